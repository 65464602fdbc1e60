"""A page in Chromium, with its console output and requests."""

from pathlib import Path
from typing import Any


def opened(browser: Any, file: Path, **options: object) -> tuple[Any, list[str], list[str]]:
    """Open a file as a page. Returns the page and two growing lists: console messages, errors included, and requested
    URLs.

    `options` are those of `browser.new_page`."""
    page = browser.new_page(**options)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{file}")
    return page, said, asked
