"""A method that its author writes in a few lines, and that says nothing of pads, decoding or chunks, is right there."""

from dataclasses import dataclass

import pytest
import torch

import kvcompress
from kvcompress import methods
from tests import fuzz
from tests.support.examples import paired
from tests.support.families import FAMILIES, SOME_FAMILIES
from tests.support.kept import kept_of, real_lengths
from tests.support.masked_reference import generate


@dataclass(frozen=True)
class AttendedKVCluster(kvcompress.KVCluster):
    """What the last eight queries attend to, by the size of the values; the latest tokens stay."""

    recent: int = 4

    def score(self, queries, keys, values, view):
        votes = view.window_attention(queries, keys, 8).mean((2, 3))
        return view.protect_recent(votes * values.float().norm(dim=-1), self.recent)


@dataclass(frozen=True)
class SummedKVCluster(kvcompress.KVCluster):
    """Sinks, and what all queries at hand attend to."""

    def score(self, queries, keys, values, view):
        return view.protect_sinks(view.column_sums(queries, keys), 2)


OWN = {"attended": AttendedKVCluster, "summed": SummedKVCluster}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    for name, cls in OWN.items():
        kvcompress.register_method(name)(cls)


CASES = [
    {"first_token": "compressed"},
    {"decode_budget": 12, "decode_interval": 3},
    {"scope": "context", "context_tokens": -5},
    {"head_budget": "adaptive", "layer_budget": "sparsity", "decode_ratio": 0.3, "decode_interval": 1},
]


@pytest.mark.parametrize("method", OWN)
@pytest.mark.parametrize(("options", "family"), paired(CASES, SOME_FAMILIES))
def test_it_equals_the_masked_full_cache_and_its_rows_alone(method, options, family):
    images = [2, 0] if FAMILIES[family].is_vlm else None
    options = {"ratio": 0.4, "first_token": "full", **options}
    config = {"family": family, "heads": (4, 2), "lengths": [50, 31], "images": images, "seed": 1}
    fuzz.check({**config, "method": method, "options": options})


@pytest.mark.parametrize("method", OWN)
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_a_row_of_a_chunked_prefill_keeps_its_budget_and_what_it_would_keep_alone(family, method):
    family = FAMILIES[family]
    model = family.build()
    inputs = family.inputs(model, [50, 31], [2, 0] if family.is_vlm else None)
    lengths, columns = real_lengths(inputs), inputs["input_ids"].shape[1]
    options = {"budget": 12, "prefill_chunk": 16, "decode_budget": 12, "decode_interval": 2}
    with kvcompress.compress(model, method, **options) as session:
        tokens, logits = generate(model, inputs, 5)
    batch = kept_of(session.cache)
    for row, length in enumerate(lengths):
        with kvcompress.compress(model, method, **options) as session:
            _, alone = generate(model, family.solo(inputs, row), 5, forced=tokens[row : row + 1])
        torch.testing.assert_close(logits[row], alone[0], atol=1e-4, rtol=0)
        for together, solo in zip(batch, kept_of(session.cache), strict=True):
            for a, b in zip(together[row], solo[0], strict=True):
                assert (a - (columns - length)).tolist() == b.tolist()
                assert len(a) == 12


def test_queries_that_a_method_did_not_ask_for_are_missed_in_one_line():
    @kvcompress.register_method("forgetful")
    @dataclass(frozen=True)
    class ForgetfulKVCluster(AttendedKVCluster):
        query_window = 0

    model = FAMILIES["qwen2"].build()
    with (
        kvcompress.compress(model, "forgetful", 0.5, decode_budget=9, decode_interval=1),
        pytest.raises(kvcompress.KVCompressError, match=r"ForgetfulKVCluster\.query_window is 0"),
    ):
        generate(model, FAMILIES["qwen2"].inputs(model, [20]), 3)


def test_the_old_name_of_final_scores_still_works_and_says_so():
    with pytest.warns(FutureWarning, match="OldKVCluster.prepared is now called final_scores"):

        @dataclass(frozen=True)
        class OldKVCluster(SummedKVCluster):
            def prepared(self, scores, prompt):
                scores = scores.clone()
                scores[..., 3] = float("inf")
                return super().prepared(scores, prompt)

    view = kvcompress.LayerView(0, 1, [9], [2], 1.0)
    kept = OldKVCluster().select(torch.arange(9.0).expand(1, 1, 9), view)
    assert kept.tolist() == [[[3, 8]]]
