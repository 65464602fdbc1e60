"""`token_spans`: passages of a prompt's text as spans of its tokens."""

from functools import cache

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import kvcompress
from kvcompress.errors import KVCompressError
from tests.support.examples import examples
from tests.support.families import FAMILIES
from tests.support.kept import kept_of

TEXT = "You see a sign. Answer in one word. Jürgen sees a sign 🙂, too; answer in a word, the other one. "


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: tokens of several characters, and characters of several tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [TEXT] * 4, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@given(
    words=st.lists(st.sampled_from(["a sign", "Jürgen", "🙂", " in one", " word", ".", "é", " "]), min_size=1),
    at=st.integers(0, 60),
    length=st.integers(1, 20),
)
@examples(60)
def test_a_span_is_the_tokens_that_have_the_passage_s_characters(words, at, length):
    text = "".join(words)
    passage = text[at : at + length]
    assume(passage and text.count(passage) == 1)
    encoded = tokenizer()(text, return_offsets_mapping=True)
    start = text.index(passage)
    own = [
        place
        for place, (first, stop) in enumerate(encoded["offset_mapping"])
        if first < start + len(passage) and stop > start
    ]
    spans = kvcompress.token_spans(tokenizer(), torch.tensor([encoded["input_ids"]]), passage)
    assert spans == f"tokens:{own[0]}-{own[-1] + 1}"


def test_several_passages_are_protected_and_share_fairly():
    ids = tokenizer()(TEXT)["input_ids"]
    spans = kvcompress.token_spans(tokenizer(), ids, "Answer in one word", "the other one")
    first, second = ([int(n) for n in part.removeprefix("tokens:").split("-")] for part in spans.split("+"))
    assert tokenizer().decode(ids[slice(*first)]).strip() == "Answer in one word"
    assert tokenizer().decode(ids[slice(*second)]).strip() == "the other one"
    model, prompt = FAMILIES["qwen2"].build(2), torch.tensor([ids]) % 100
    with kvcompress.compress(model, "random", budget=30, protect=spans) as session:
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, do_sample=False)
        kept = {*kept_of(session.cache)[0][0][0].tolist()}
    assert {*range(*first), *range(*second)} <= kept
    kvcompress.compress(model, "snapkv", 0.5, fair=spans)


@pytest.mark.parametrize(
    ("ids", "passages", "problem"),
    [
        ([[1, 2]] * 2, ("a",), r"one prompt, .* not \(2, 2\)"),
        ([1, 2], (), "needs a passage"),
        (None, ("absent",), "has 'absent' 0 times, not once"),
        (None, ("a sign",), "has 'a sign' 2 times, not once"),
        (None, ("",), "has '' 0 times"),
    ],
)
def test_what_names_no_tokens_is_refused_in_one_line(ids, passages, problem):
    with pytest.raises(KVCompressError, match=problem) as refusal:
        kvcompress.token_spans(tokenizer(), tokenizer()(TEXT)["input_ids"] if ids is None else ids, *passages)
    assert "\n" not in str(refusal.value)
