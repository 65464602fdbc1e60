"""What is known of a prompt, however it is known, changes nothing of an answer but its time."""

import pytest
import torch

import kvcompress
from kvcompress import PrefixCache
from kvcompress.hooks.shared_prompt import SharedPrompt
from tests.support.answers import Answer, answer, assert_same
from tests.support.examples import paired
from tests.support.families import FAMILIES
from tests.support.in_flight import with_end
from tests.support.storages import STORAGES

END = 6  # tokens of a question
LENGTHS = [40, 63]
SNAPKV = {"method": "snapkv", "ratio": 0.4, "window_size": 4}  # a larger window would be all that is kept
OPTIONS = {
    "fed again": {"first_token": "compressed"},
    "context": {"scope": "context", "context_tokens": -END},
    "evicting": {"decode_budget": 8, "decode_interval": 2},
    "layers": {"layer_budget": "global"},
    "heads": {"head_budget": "adaptive"},
    "moved keys": {"positions": "cache"},
    "merged": {"merge": "average"},
    "protected": {"protect": "first:3+last:2"},
    "fair": {"fair": "first:6"},
    **{name: STORAGES[name] for name in ("static", "offloaded", "think", "hqq")},
}
FIRST = {"scope": "context-first", "context_tokens": -END}
OF_CONTEXTS = [name for name in OPTIONS if name not in ("context", "moved keys")]


def prefill(model, inputs: dict, **options: object) -> Answer:
    """By a `SharedPrompt`: the whole prompt was read for another method."""
    with SharedPrompt(model) as shared:
        answer(model, inputs)
    with SharedPrompt(model, shared.prompt_pass) as again:
        ours = answer(model, inputs, **SNAPKV, **options)
    assert again.is_known
    return ours


def prefixes(model, inputs: dict, **options: object) -> Answer:
    """By a `PrefixCache`: prompts that end otherwise were read for another method."""
    known = PrefixCache(gb=1)
    answer(model, with_end(inputs, END), prefix_cache=known)
    ours = answer(model, inputs, **SNAPKV, prefix_cache=known, **options)
    assert known.reused_tokens == sum(LENGTHS) - len(LENGTHS) * END
    return ours


def contexts(model, inputs: dict, **options: object) -> Answer:
    """By a `PrefixCache`: what is kept of the contexts was chosen for other questions."""
    known = PrefixCache(gb=1)
    answer(model, with_end(inputs, END), **SNAPKV, prefix_cache=known, **options)
    held = known.nbytes
    ours = answer(model, inputs, **SNAPKV, prefix_cache=known, **options)
    assert known.reused_tokens == sum(LENGTHS) - len(LENGTHS) * END
    assert known.nbytes == held
    return ours


CASES = [
    (way, name, family)
    for way, names in ((prefill, OPTIONS), (prefixes, OPTIONS), (contexts, OF_CONTEXTS))
    for name, family in paired(list(names), ["qwen2", "qwen3-vl"])
]


@pytest.mark.parametrize(("known_by", "name", "family"), CASES, ids=lambda part: getattr(part, "__name__", part))
def test_every_protocol_and_storage_goes_with_what_is_known(known_by, name, family):
    options = OPTIONS[name] | (FIRST if known_by is contexts else {})
    model = FAMILIES[family].build()
    inputs = FAMILIES[family].inputs(model, LENGTHS, [1, 1] if FAMILIES[family].is_vlm else None)
    ours, expected = known_by(model, inputs, **options), answer(model, inputs, **SNAPKV, **options)
    assert_same(ours, expected, tolerance=1e-4 if known_by is prefixes else 0)


@torch.no_grad()
@pytest.mark.parametrize("name", OF_CONTEXTS)
def test_two_answers_about_one_context_go_on_side_by_side(name):
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, LENGTHS)
    ids, mask = inputs["input_ids"][:, -1:], torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    of_both = []
    for prefixes in (None, PrefixCache(gb=1)):
        with kvcompress.compress(model, **SNAPKV, prefix_cache=prefixes, **FIRST, **OPTIONS[name]) as session:
            caches = []
            for seed in (1, 2, 3):
                session.model(**with_end(inputs, END, seed), logits_to_keep=1)
                caches.append(session.cache)
            for last in (0, 1):  # another token in each
                for cache in caches:
                    step = {"attention_mask": torch.nn.functional.pad(mask, (0, last), value=1)}
                    step["position_ids"] = step["attention_mask"].sum(1, keepdim=True) - 1
                    token = (ids + 7 * len(caches) * last + caches.index(cache)) % 100
                    of_both.append(session.model(input_ids=token, past_key_values=cache, **step).logits[:, -1])
    half = len(of_both) // 2
    for ours, expected in zip(of_both[half:], of_both[:half], strict=True):
        assert torch.equal(ours, expected)
