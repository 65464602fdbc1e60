"""What methods declare: where they come from, and whether they ask queries."""

from pathlib import Path

import torch

from kvcompress import list_methods
from kvcompress.cache.choice import Choice
from kvcompress.policy.make import make_policy

PAGE = Path(__file__).parents[3] / "docs" / "methods.md"


def test_the_paper_of_every_method_is_the_one_that_its_documentation_links_to():
    text = PAGE.read_text(encoding="utf-8")
    for name, info in list_methods().items():
        if info.paper:
            assert f": {info.paper}\n" in text, name


def test_while_decoding_no_query_is_remembered_for_a_method_that_asks_none():
    queries = torch.zeros(1, 1, 10, 1)
    for method in ("keydiff", "knorm", "random", "streamingllm", "vnorm"):
        choice = Choice(make_policy(method, 0.5, decode_budget=8), 0, 0, 1)
        assert choice.voters(queries) is None, method
        assert choice.latest(queries, None) is None, method
