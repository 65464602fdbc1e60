"""`protect_text=`: text is found in each row of a first prompt, and stays as what `protect=` names does."""

import copy
import json
import pickle

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.errors import KVCompressError
from kvcompress.policy.make import make_policy
from tests import fuzz
from tests.kvcompress.cache.test_protect import config, kept
from tests.support.examples import some
from tests.support.families import FAMILIES
from tests.support.kept import kept_of
from tests.support.passages import PASSAGE, OneLetterPerToken, passage_of, with_passage
from tests.support.strategies import METHODS, SOME_METHODS

MODEL, READER = FAMILIES["qwen2"].build(), OneLetterPerToken()
TEXT = {"protect_text": PASSAGE, "tokenizer": READER}
OPTIONS = (
    {},
    {"prefill_chunk": 9},
    {"first_token": "compressed"},
    {"scope": "context", "context_tokens": -4},
    {"decode_ratio": 0.3, "decode_interval": 1},
    {"protect": "first:2+last:1"},
    {"prefix_cache": True},
)


def prompts(*lengths: int, seed: int = 3) -> dict:
    return with_passage(FAMILIES["qwen2"].inputs(MODEL, list(lengths), seed=seed))


def compress(ratio: float = 0.3, **options: object) -> kvcompress.hooks.session.Session:
    return kvcompress.compress(MODEL, "snapkv", ratio, **{"window_size": 2, **options})


@pytest.mark.parametrize("method", some(METHODS, SOME_METHODS))
def test_the_passage_stays_in_every_pass_and_every_batch(method):
    options = {"ratio": 0.5, "decode_ratio": 0.4, "decode_interval": 2}
    fuzz.check(config(method, protect_text=PASSAGE, **options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_passage_is_what_its_span_is(options):
    """Rows together under `protect_text=` are as each alone under `protect=` with the span that `token_spans` finds."""
    inputs, options = prompts(50, 33, 41), dict(options)
    prefixes = {"prefix_cache": kvcompress.PrefixCache(gb=1)} if options.pop("prefix_cache", False) else {}
    with compress(**options, **TEXT) as session:
        tokens, _ = generate(MODEL, inputs, 6)
        together = kept_of(session.cache)
    for row, length in enumerate([50, 33, 41]):
        solo = FAMILIES["qwen2"].solo(inputs, row)
        span = kvcompress.token_spans(READER, solo["input_ids"], PASSAGE)
        named = "+".join(filter(None, [options.get("protect"), span]))
        found = []
        for given in ({"protect": named}, TEXT | prefixes, TEXT | prefixes):  # the prefix cache's second time has a hit
            with compress(**{**options, **given}) as session:
                generate(MODEL, solo, 6, tokens[row : row + 1])
                found.append(kept(session.cache).tolist())
        own = [[(head - (50 - length)).tolist() for head in layer[row]] for layer in together]
        assert found == [own] * 3


def test_several_passages_are_a_list_or_json_and_results_name_both_alike():
    inputs = prompts(40)
    first, second = PASSAGE, chr(inputs["input_ids"][0, 5]) + chr(inputs["input_ids"][0, 6])
    policies = [
        make_policy("snapkv", 0.5, protect_text=each) for each in ([first, second], json.dumps([first, second]))
    ]
    assert policies[0] == policies[1]
    assert policies[0].options["protect_text"] == json.dumps([first, second], ensure_ascii=False)
    with compress(**TEXT | {"protect_text": (first, second)}) as session:
        generate(MODEL, inputs, 1)
    mask = passage_of(inputs)[0]
    mask[5:7] = True
    for head in kept(session.cache).flatten(0, 1).tolist():
        assert set(mask.nonzero()[:, 0].tolist()) <= set(head)


@pytest.mark.parametrize(
    ("given", "passages", "setting"),
    [
        ("a, b", ("a, b",), "a, b"),
        (["a"], ("a",), "a"),
        (192, ("192",), "192"),
        ("[1]", ("[1]",), "[1]"),
        (["[]", "b"], ("[]", "b"), '["[]", "b"]'),
        (['["a"]'], ('["a"]',), '["[\\"a\\"]"]'),
        ("ü\nb", ("ü\nb",), '["ü\\nb"]'),
    ],
)
def test_a_setting_is_one_line_that_names_its_passages(given, passages, setting):
    policy = make_policy("snapkv", 0.5, protect_text=given)
    assert (policy.passages, policy.engine.protect_text) == (passages, setting)
    assert make_policy("snapkv", 0.5, protect_text=setting) == policy


def test_a_later_prompt_may_lack_the_passage():
    context, question = prompts(30), FAMILIES["qwen2"].inputs(MODEL, [9], seed=8)["input_ids"]
    places = set(passage_of(context)[0].nonzero()[:, 0].tolist())
    with torch.no_grad(), compress(decode_ratio=0.3, decode_interval=1, **TEXT) as session:
        MODEL(**context)
        for _ in range(2):
            with session.reuse() as cache:
                MODEL(question, past_key_values=cache)
                MODEL(question[:, :1], past_key_values=cache)
                assert all(places <= set(head) for head in kept(cache).flatten(0, 1).tolist())


def test_caches_copied_loaded_and_pickled_go_on_and_are_reused_only_under_the_same_passage(tmp_path):
    inputs = prompts(30)
    with torch.no_grad(), compress(**TEXT, decode_ratio=0.3, decode_interval=1) as session:
        cache = MODEL(**inputs).past_key_values
        cache.save(tmp_path / "cache")
        loaded, pickled = kvcompress.CompressedCache.load(tmp_path / "cache", MODEL), pickle.loads(pickle.dumps(cache))
        caches = [cache, loaded, copy.deepcopy(cache), pickled]
        for each in caches:
            with session.reuse(each):
                for token in range(5):
                    MODEL(inputs["input_ids"][:, token : token + 1], past_key_values=each)
                assert {*passage_of(inputs)[0].nonzero()[:, 0].tolist()} <= {*kept(each)[0, 0].tolist()}
    assert caches[2]._decode is cache._decode
    with compress(protect_text="x", tokenizer=READER, decode_ratio=0.3, decode_interval=1) as session:  # noqa: SIM117
        with pytest.raises(KVCompressError, match="protect_text='abc', not 'x'"), session.reuse(caches[1]):
            pass


def test_a_cache_of_ones_own_takes_the_tokenizer_too():
    with torch.no_grad(), kvcompress.attach(MODEL):
        cache = kvcompress.CompressedCache(MODEL.config, "random", 0.3, **TEXT)
        inputs = prompts(30)
        MODEL(**inputs, past_key_values=cache)
        assert {*passage_of(inputs)[0].nonzero()[:, 0].tolist()} <= {*kept(cache)[0, 0].tolist()}
        cache = kvcompress.CompressedCache(MODEL.config, "random", 0.3, protect_text=PASSAGE)
        with pytest.raises(KVCompressError, match=r"needs tokenizer=.* not a NoneType"):
            MODEL(**inputs, past_key_values=cache)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tokenizer": None}, "protect_text= needs tokenizer=, the model's tokenizer or processor, not a NoneType"),
        ({"tokenizer": "gpt2"}, "not a str"),
        ({"protect_text": "absent"}, "the prompt of row 0 has 'absent' 0 times, not once: no tokens"),
        ({"protect_text": "ABC"}, "the prompt of row 0 has 'ABC' 0 times, not once, but 'abc'"),
        ({"protect_text": ""}, "option 'protect_text' is '': Input should have characters of the prompt"),
        ({"protect_text": []}, r"option 'protect_text' is \[\]: Input should have characters"),
        ({"protect_text": ["a", ""]}, "Input should have characters"),
        ({"protect_text": True}, "option 'protect_text' is True: Input should be a valid string"),
        ({"protect_text": [1]}, r"option 'protect_text' is \[1\]: Input should be a valid string"),
        ({"ratio_of": "vision"}, "protect= and protect_text= need ratio_of='prompt'"),
        ({"ratio": 0.05}, "protect_text='abc' needs 3 entries in row 0, but the budget keeps 2: give a larger one"),
        ({"ratio": 0.1, "protect": "first:4"}, "protect='first:4' with protect_text='abc' needs 7 entries in row 0"),
        ({"decode_budget": 3}, "protect_text='abc' needs 4 entries in row 0, but 3 stay while decoding"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_one_line(options, said):
    with pytest.raises(KVCompressError, match=said) as refusal, compress(**TEXT | options):
        generate(MODEL, prompts(40), 2)
    assert "\n" not in str(refusal.value)


def test_the_row_that_lacks_the_passage_is_named_and_ids_are_needed():
    inputs = prompts(40, 40)
    inputs["input_ids"][1] = FAMILIES["qwen2"].inputs(MODEL, [40], seed=9)["input_ids"][0]
    with pytest.raises(KVCompressError, match="the prompt of row 1 has 'abc' 0 times"), compress(**TEXT):
        generate(MODEL, inputs, 2)
    with pytest.raises(KVCompressError, match="protect_text= needs input_ids"), compress(**TEXT):
        MODEL(inputs_embeds=MODEL.get_input_embeddings()(prompts(40)["input_ids"]))
