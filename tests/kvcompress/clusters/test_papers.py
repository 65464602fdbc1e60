"""Where each method comes from."""

from pathlib import Path

from kvcompress import list_methods

PAGE = Path(__file__).parents[3] / "docs" / "methods.md"


def test_the_paper_of_every_method_is_the_one_that_its_documentation_links_to():
    text = PAGE.read_text(encoding="utf-8")
    for name, info in list_methods().items():
        if info.paper:
            assert f": {info.paper}\n" in text, name
