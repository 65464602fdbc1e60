"""A page of ours in Chromium, and what it says and asks for."""

from pathlib import Path
from typing import Any


def opened(browser: Any, file: Path, **options: object) -> tuple[Any, list[str], list[str]]:
    """The page of a file, and two lists that grow with it: what it writes on its console, errors among it, and the
    addresses that it loads from. `options`: of `browser.new_page`."""
    page = browser.new_page(**options)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{file}")
    return page, said, asked
