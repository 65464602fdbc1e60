"""Hooks of mkdocs.yml that add the pages outside docs/*.md to the documentation site.

Pages link to each other as files of the repository, so that they can be read there. These hooks rewrite the links for
the site; a link to a source file becomes its name.
"""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Page of the site -> file of the repository.
OUTSIDE = {
    "index.md": "README.md",
    "by-task.md": "docs/README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "examples.md": "examples/README.md",
    "tiny-checkpoint.md": "lmms_eval_plugins/tiny_vlm/checkpoint/README.md",
    "benchmarks/README.md": "benchmarks/README.md",
    **{
        f"benchmarks/results/{path.name}": f"benchmarks/results/{path.name}"
        for path in (ROOT / "benchmarks" / "results").glob("*.md")
    },
}
NOTEBOOKS = {f"{path.stem}.md": f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.ipynb"))}
WRITTEN = {**NOTEBOOKS, "api.md": ""}
PAGE_OF = {source: page for page, source in {**OUTSIDE, **WRITTEN}.items() if source}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
REFERENCE = re.compile(r"^(\[[^\]]+\]: )([^\s#]+)(#\S*)?$", re.MULTILINE)


def on_files(files: Files, config: dict) -> Files:
    files.remove(files.get_file_from_path("README.md"))
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for page, source in NOTEBOOKS.items():
        files.append(File.generated(config, page, content=notebook(ROOT / source)))
    files.append(File.generated(config, "api.md", content=api()))
    return files


def on_page_markdown(markdown: str, page: object, **_: object) -> str:
    where = PurePosixPath(page.file.src_uri)
    folder = (ROOT / OUTSIDE.get(str(where), f"docs/{where}")).parent

    def place(target: str, anchor: str | None) -> str | None:
        """Return the site's path of `target`; None for a file that it does not contain."""
        if re.match(r"[a-z]+:", target):
            return target + (anchor or "")
        source = Path(os.path.normpath(folder / target)).relative_to(ROOT).as_posix()
        known = PAGE_OF.get(source, source.removeprefix("docs/") if source.startswith("docs/") else None)
        return known and os.path.relpath(known, where.parent) + (anchor or "")

    def moved(match: re.Match) -> str:
        mark, text, target, anchor = match.groups()
        found = place(target, anchor)
        return f"{mark}[{text}]({found})" if found else text

    markdown = REFERENCE.sub(lambda match: match[1] + (place(match[2], match[3]) or match[2]), markdown)
    return LINK.sub(moved, markdown)


def notebook(path: Path) -> str:
    """Convert a notebook to Markdown: text, code, and the code's output."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = []
        for output in cell["outputs"]:
            data = output.get("data", {})
            if (kind := next((kind for kind in ("image/png", "image/jpeg") if kind in data), None)) is not None:
                parts.append(f'<img alt="{first_line(source)}" src="data:{kind};base64,{data[kind].strip()}">')
            elif "text/html" in data:
                parts.append("".join(data["text/html"]))
            else:
                printed += output.get("text") or data.get("text/plain", [])
        if printed:
            parts.append("```text\n" + "".join(printed).rstrip() + "\n```")
    return "\n\n".join(parts)


def first_line(source: str) -> str:
    return source.splitlines()[0].replace('"', "&quot;")


def api() -> str:
    """Return a page with the docstring of every public name."""
    tree = ast.parse((ROOT / "kvcompress" / "__init__.py").read_text(encoding="utf-8"))
    homes = {
        alias.asname or alias.name: f"kvcompress.{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 1  # including imports for type checkers
        for alias in node.names
        if alias.name != "__version__"
    }
    first = ("compress", "attach", "Session", "CompressedCache", "list_methods", "register_method", "KVCluster")
    names = [*first, *sorted(homes.keys() - {*first}, key=str.lower)]
    text = "# API\n\nThe public names of `kvcompress`, starting with those that most programs need.\n"
    return text + "".join(f"\n::: {homes[name]}\n    options: {{heading: kvcompress.{name}}}\n" for name in names)
