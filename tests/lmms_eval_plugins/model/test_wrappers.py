"""With a full cache and the arguments of docs/published-settings.md our answers are those of lmms-eval's own wrappers,
token for token, to the same requests."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import GenerationConfig

from kvcompress import KVCompressError
from lmms_eval_plugins.model.lm import KVCompressLM
from tests.support.checkpoints import image, requests, save_checkpoint
from tests.support.examples import some

pytest.importorskip("qwen_vl_utils")

# family -> module and class of lmms-eval's wrapper, and our arguments that make us its equal.
WRAPPERS = {
    "llava-1.5": ("llava_hf", "LlavaHf", {"max_new_tokens": 1024}),
    "llava-next": ("llava_hf", "LlavaHf", {"max_new_tokens": 1024}),
    "llava-onevision": ("llava_hf", "LlavaHf", {"max_new_tokens": 1024, "tile_every_image": True}),
    "qwen2.5-vl": (
        "qwen2_5_vl",
        "Qwen2_5_VL",
        {"dtype": "bfloat16", "min_pixels": 200704, "max_pixels": 1605632, "image_resize": "qwen_vl_utils"},
    ),
    "qwen3-vl": (
        "qwen3_vl",
        "Qwen3_VL",
        {
            "dtype": "bfloat16",
            "min_pixels": 4096,
            "max_pixels": 16777216,
            "image_resize": "qwen_vl_utils",
            "system_prompt": "You are a helpful assistant.",
        },
    ),
    "internvl": ("internvl_hf", "InternVLHf", {"dtype": "bfloat16", "max_new_tokens": 1024}),
}
FEW = ("llava-onevision", "qwen2.5-vl")  # families of an ordinary run
NEW_TOKENS = 4
SEEN_THROUGH = image(9)
SEEN_THROUGH.putalpha(Image.linear_gradient("L").resize(SEEN_THROUGH.size))
DOCS = [
    {"text": "what word is on the red sign?", "images": [image(0, 112, 112)]},
    {"text": "what is on the blue one?", "images": [image(3, 100, 61)]},
    {"text": "and on the large one?", "images": [image(4, 530, 410)]},
    {"text": "and on the small one?", "images": [image(5, 20, 17)]},
    {"text": "which of the two?", "images": [image(1), image(2, 64, 64)]},
    {"text": "which of the three?", "images": [image(6, 130, 60), image(7, 60, 130), image(8, 90, 90)]},
    {"text": "what is on the transparent one?", "images": [SEEN_THROUGH]},
    {"text": "hello"},
]


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory):
    """family -> `folder` of its checkpoint, the questions (`docs`), and `calls`, `texts` of lmms-eval's wrapper."""
    asked = {}

    def ask(family: str) -> SimpleNamespace:
        if family not in asked:
            folder = save_checkpoint(family, tmp_path_factory.mktemp(family))
            config = GenerationConfig.from_pretrained(
                folder
            )  # as Qwen2.5-VL's: not for greedy decoding, but the penalty
            config.update(do_sample=True, temperature=0.1, top_k=1, top_p=0.001, repetition_penalty=1.5)
            config.save_pretrained(folder)
            module, name, _ = WRAPPERS[family]
            lm = wrapper_class(module, name)(pretrained=folder, device="cpu", device_map="cpu", batch_size=1)
            # `llava_hf` fails on a question without images: it hands an empty list to the processor (IndexError).
            docs = DOCS[:-1] if module == "llava_hf" else DOCS
            calls, texts = answer(lm, docs)
            asked[family] = SimpleNamespace(folder=folder, docs=docs, calls=calls, texts=texts)
        return asked[family]

    return ask


def wrapper_class(module: str, name: str) -> Any:
    """With a stand-in for decord, which the module imports for videos: the real one disturbs PyAV in its process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "decord", SimpleNamespace(VideoReader=None, cpu=None))
        return getattr(importlib.import_module(f"lmms_eval.models.chat.{module}"), name)


def ours(folder: str, docs: list[dict], new_tokens: int = NEW_TOKENS, **arguments: Any) -> tuple[list[dict], list[str]]:
    return answer(KVCompressLM(pretrained=folder, device="cpu", **arguments), docs, new_tokens)


def answer(lm: Any, docs: list[dict], new_tokens: int = NEW_TOKENS) -> tuple[list[dict], list[str]]:
    """What each `generate` was given (floats in the model's precision) and gave (`new_tokens`), and the texts.

    Answers end after `new_tokens`, whatever `max_new_tokens` the wrapper asks for.
    """
    calls, generate = [], lm.model.generate

    def note(**inputs: Any) -> torch.Tensor:
        tokens = generate(**{**inputs, "max_new_tokens": new_tokens})
        call = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
        call |= {name: value.to(lm.model.dtype) for name, value in call.items() if value.is_floating_point()}
        call |= {
            "max_new_tokens": torch.tensor(inputs["max_new_tokens"]),
            "dtype": torch.empty(0, dtype=lm.model.dtype),
        }
        calls.append(call | {"new_tokens": tokens[:, call["input_ids"].shape[1] :]})
        return tokens

    lm.model.generate = note
    results = [lm.generate_until([request])[0] for request in requests(lm, docs)]
    return calls[-len(docs) :], [result.text for result in results]  # before them, a warm-up


def differences(left: list[dict], right: list[dict]) -> list[set[str]]:
    """For each question, what is not the same, bit by bit."""
    found = []
    for one, other in zip(left, right, strict=True):
        shared = one.keys() & other.keys()
        found.append((one.keys() ^ other.keys()) | {name for name in shared if not _same(one[name], other[name])})
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("family", some(WRAPPERS, FEW))
def test_inputs_and_answers_are_those_of_lmms_evals_own_wrapper(wrapper, family):
    theirs = wrapper(family)
    calls, texts = ours(theirs.folder, theirs.docs, **WRAPPERS[family][2])
    assert differences(calls, theirs.calls) == [set()] * len(calls)
    assert texts == theirs.texts
    assert all(call["new_tokens"].shape == (1, NEW_TOKENS) for call in calls)
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("family", "argument", "difference", "first"),
    some(
        [
            ("llava-onevision", "max_new_tokens", "max_new_tokens", 0),
            ("llava-onevision", "tile_every_image", "batch_num_images", 4),
            ("qwen2.5-vl", "dtype", "dtype", 0),
            ("qwen2.5-vl", "min_pixels", "image_grid_thw", 0),
            ("qwen2.5-vl", "max_pixels", "image_grid_thw", 2),
            ("qwen2.5-vl", "image_resize", "image_grid_thw", 1),
            ("qwen3-vl", "dtype", "dtype", 0),
            ("qwen3-vl", "max_pixels", "image_grid_thw", 2),
            ("qwen3-vl", "image_resize", "pixel_values", 1),
            ("qwen3-vl", "system_prompt", "input_ids", 0),
            ("internvl", "dtype", "dtype", 0),
            ("internvl", "max_new_tokens", "max_new_tokens", 0),
        ],
        FEW,
    ),
)
def test_each_argument_is_needed(wrapper, family, argument, difference, first):
    """Without it, `difference` is not the same from the question numbered `first` on."""
    theirs = wrapper(family)
    arguments = {name: value for name, value in WRAPPERS[family][2].items() if name != argument}
    calls, _ = ours(theirs.folder, theirs.docs[: first + 1], new_tokens=1, **arguments)
    found = differences(calls, theirs.calls[: first + 1])
    assert [difference in names for names in found] == [False] * first + [True]


def test_tiles_of_several_images_in_a_batch_are_those_of_each_question_alone(wrapper):
    theirs, arguments = wrapper("llava-onevision"), {"tile_every_image": True, "max_new_tokens": NEW_TOKENS}
    _, without_image = ours(theirs.folder, DOCS[-1:], **arguments)
    lm = KVCompressLM(pretrained=theirs.folder, device="cpu", batch_size=4, **arguments)
    answers = lm.generate_until(requests(lm, DOCS[3:]))
    assert [result.text for result in answers] == theirs.texts[3:] + without_image


def test_an_argument_that_needs_a_package_says_how_to_get_it(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "qwen_vl_utils", None)  # as if it were not installed
    with pytest.raises(KVCompressError, match="pip install qwen-vl-utils"):
        KVCompressLM(pretrained=checkpoint("qwen2.5-vl"), device="cpu", image_resize="qwen_vl_utils")
