"""The HTML page: one file, without network; styles, scripts and data stand in it."""

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from kvcompress.files import write_text

TEMPLATES = Path(__file__).parent / "templates"


def write_page(path: Path, title: str, data: dict[str, Any]) -> None:
    """Write the page that shows `data` (see `data.page_data`)."""
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    page = environment.get_template("page.html.jinja").render(
        title=title,
        style=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=(TEMPLATES / "page.js").read_text(encoding="utf-8"),
        # `</script>` in an answer must not end the element that holds the data.
        data=json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )
    write_text(path, page)
