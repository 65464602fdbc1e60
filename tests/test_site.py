"""The documentation site: ./scripts/build_docs.sh."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvcompress

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Built strictly: a link or an anchor that leads nowhere ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_page_of_the_documentation_is_in_the_navigation(site):
    start = (site / "index.html").read_text(encoding="utf-8")
    pages = {path.stem for path in (ROOT / "docs").glob("*.md") if path.stem != "README"}
    pages |= {path.stem for path in (ROOT / "docs").glob("*.ipynb")} | {"by-task", "api", "benchmarks", "examples"}
    assert not {page for page in pages if f'href="{page}/"' not in start and not (site / page / "index.html").exists()}
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not {page for page in pages if f"{page}.md" not in config and f"{page}/README.md" not in config}


def test_the_reference_has_every_public_name(site):
    reference = (site / "api" / "index.html").read_text(encoding="utf-8")
    names = set(kvcompress.__all__) - {"__version__", "Prompt"}  # the former name of LayerView
    assert not {name for name in names if f">kvcompress.{name}<" not in re.sub(r"\s", "", reference)}


def test_no_page_asks_the_network_for_anything(site):
    for page in site.rglob("*.html"):
        found = re.findall(r'(?:src|href)="(https?://[^"]+)"', page.read_text(encoding="utf-8"))
        assert not [url for url in found if url.endswith((".css", ".js", ".woff2", ".png", ".svg"))], page


def test_tables_are_sorted_by_a_click_on_their_head(site):
    page = (site / "benchmarks" / "results" / "fidelity" / "index.html").read_text(encoding="utf-8")
    assert "sort-tables.js" in page
    assert (site / "sort-tables.js").exists()
