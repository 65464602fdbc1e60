"""Write an HTML page as one file that contains its styles, scripts and data and needs no network."""

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from kvcompress.files import write_text

TEMPLATES = Path(__file__).parent / "templates"


def write_page(path: Path, title: str, data: dict[str, Any], folder: Path = TEMPLATES, name: str = "page") -> None:
    """Write a page that shows `data`, JSON-ready; by default the report's, see `data.page_data`.

    Args:
        folder, name: where the template `<name>.html.jinja` is, which extends `base.html.jinja`. The page includes the
            common script and style, then `<name>-*.js`, `<name>.js` and `<name>.css` from that folder.
    """
    environment = Environment(loader=FileSystemLoader([folder, TEMPLATES]), autoescape=True)
    styles = [TEMPLATES / "common.css", *folder.glob(f"{name}.css")]
    scripts = [TEMPLATES / "common.js", *sorted(folder.glob(f"{name}-*.js")), folder / f"{name}.js"]
    page = environment.get_template(f"{name}.html.jinja").render(
        title=title,
        style="".join(file.read_text(encoding="utf-8") for file in styles),
        script="".join(file.read_text(encoding="utf-8") for file in scripts),
        # `</script>` in an answer must not end the element that holds the data.
        data=json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )
    write_text(path, page)
