"""The vision-language methods on every kind of prompt: images at the start, in the middle, at the end, several, side by
side, none, and videos. What is defined there is written in docs/vision-methods.md."""

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.clusters.snapkv import SnapKVCluster
from kvcompress.scoring.layer_view import LayerView
from kvcompress.scoring.vision import question_lengths_of
from tests.support.examples import paired
from tests.support.families import FIRST_TEXT, IMAGE, PAD, VIDEO, VISION_START, VLM_FAMILIES, VOCAB_SIZE, Family
from tests.support.kept import expected_entries, kept_of, real_lengths

VISION_METHODS = ["aircache", "csp", "infinipot-v", "look-m", "meda", "mixkv", "prefixkv", "tgv-kv", "vl-cache"]
NEW = 3
# Numbers are text tokens, "image" is one image.
LAYOUTS: dict[str, list] = {
    "start": ["image", 20],
    "middle": [8, "image", 12],
    "end": [20, "image"],
    "several": [4, "image", 3, "image", 9],
    "side by side": ["image", "image"],
    "none": [24],
    "one token": [1],
}


def text(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randperm(VOCAB_SIZE - FIRST_TEXT, generator=generator)[:count] + FIRST_TEXT).tolist()


def batch_of_all_layouts(family: Family, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    counts = [layout.count("image") for layout in LAYOUTS.values()]
    rows = []
    for seed, (layout, images) in enumerate(zip(LAYOUTS.values(), counts, strict=True)):
        image = [VISION_START, *[IMAGE] * family.image_tokens(images)]
        words = text(sum(part for part in layout if part != "image"), seed)
        parts = [image if part == "image" else [words.pop() for _ in range(part)] for part in layout]
        rows.append([token for part in parts for token in part])
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    inputs = family.inputs(model, [1] * len(rows), counts)  # for the pixels
    inputs |= {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return inputs


def assert_budgets(session: kvcompress.Session, ratio: float, inputs: dict, decoded: int) -> None:
    """Exact totals per row over layers and heads, and the same number in every head of a layer."""
    kept = kept_of(session.cache)
    for row, length in enumerate(real_lengths(inputs)):
        sizes = [{len(head) for head in layer[row]} for layer in kept]
        assert all(len(of_layer) == 1 for of_layer in sizes)
        assert sum(size.pop() - decoded for size in sizes) == len(kept) * expected_entries(ratio, length)


@pytest.mark.parametrize(("method", "family"), paired(VISION_METHODS, list(VLM_FAMILIES)))
def test_budgets_are_exact_wherever_the_images_stand(family, method):
    model = VLM_FAMILIES[family].build()
    inputs = batch_of_all_layouts(VLM_FAMILIES[family], model)
    for ratio in (0.1, 0.6):
        with kvcompress.compress(model, method, ratio) as session:
            _, logits = generate(model, inputs, NEW)
        assert logits.isfinite().all()
        assert_budgets(session, ratio, inputs, NEW - 1)


@pytest.mark.parametrize(("method", "family"), paired(VISION_METHODS, ["llava-onevision", "qwen3-vl"]))
def test_every_kind_of_prompt_keeps_the_same_alone_as_in_a_batch(family, method):
    model = VLM_FAMILIES[family].build()
    inputs = batch_of_all_layouts(VLM_FAMILIES[family], model)
    with kvcompress.compress(model, method, 0.3) as session:
        model(**inputs)
        together = kept_of(session.cache)
        for row, length in enumerate(real_lengths(inputs)):
            model(**VLM_FAMILIES[family].solo(inputs, row))
            pads = inputs["input_ids"].shape[1] - length
            for layer, alone in zip(together, kept_of(session.cache), strict=True):
                assert [(head - pads).tolist() for head in layer[row]] == [head.tolist() for head in alone[0]]


@pytest.mark.parametrize("method", ["aircache", "infinipot-v", "look-m", "meda", "tgv-kv"])
def test_text_is_evicted_last(method):
    family = VLM_FAMILIES["qwen2.5-vl"]
    model = family.build()
    inputs = batch_of_all_layouts(family, model)
    options = {"look-m": {"recent": 0.0}, "meda": {"recent": 0.0}, "tgv-kv": {"sinks": 0}}.get(method, {})
    with kvcompress.compress(model, method, 0.4, **options) as session:
        model(**inputs)
    is_vision = inputs["input_ids"] == IMAGE
    both = 0
    for layer in kept_of(session.cache):
        for row, heads in enumerate(layer):
            for head in heads:
                texts = int((~is_vision[row] & inputs["attention_mask"][row].bool()).sum())
                # tgv-kv always keeps the last token, and that is vision where an image ends the prompt
                vision_kept = int(is_vision[row, head].sum()) - int(method == "tgv-kv" and is_vision[row, -1])
                all_text = len(head) - int(is_vision[row, head].sum()) == texts
                assert all_text or vision_kept <= 0
                both += all_text and vision_kept > 0
    assert both, "no row has room for all text and some vision: the test shows nothing"


@pytest.mark.parametrize(("method", "family"), paired(VISION_METHODS, list(VLM_FAMILIES)))
def test_ratio_of_vision_keeps_text_and_exactly_the_share_of_vision(family, method):
    model = VLM_FAMILIES[family].build()
    inputs = batch_of_all_layouts(VLM_FAMILIES[family], model)
    with kvcompress.compress(model, method, 0.3, ratio_of="vision") as session:
        model(**inputs)
    is_vision, real = inputs["input_ids"] == IMAGE, inputs["attention_mask"].bool()
    kept = kept_of(session.cache)
    for row in range(len(is_vision)):
        heads = [head for layer in kept for head in layer[row]]
        texts, images = int((~is_vision[row] & real[row]).sum()), int(is_vision[row].sum())
        assert all(int((~is_vision[row, head]).sum()) == texts for head in heads)
        share = expected_entries(0.3, images) if images else 0
        assert sum(int(is_vision[row, head].sum()) for head in heads) == len(heads) * share


@pytest.mark.parametrize(
    ("method", "family"), paired(VISION_METHODS, ["llava-onevision", "qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
)
def test_budgets_are_exact_with_a_video(family, method):
    model = VLM_FAMILIES[family].build()
    inputs = VLM_FAMILIES[family].video_inputs()
    with kvcompress.compress(model, method, 0.4) as session:
        _, logits = generate(model, inputs, NEW)
    assert logits.isfinite().all()
    assert_budgets(session, 0.4, inputs, NEW - 1)


@pytest.mark.parametrize(
    "options", [{}, {"scope": "context", "context_tokens": 15}, {"scope": "context-first", "context_tokens": -5}]
)
def test_the_host_knows_how_many_tokens_ask_about_the_images(options, monkeypatch):
    model, family, views = VLM_FAMILIES["qwen2-vl"].build(), VLM_FAMILIES["qwen2-vl"], []

    def score(cluster: SnapKVCluster, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: LayerView):
        views.append(view)
        return torch.rand(keys.shape[:3])

    monkeypatch.setattr(SnapKVCluster, "score", score)
    inputs = batch_of_all_layouts(family, model)
    if options.get("scope") == "context-first":  # takes rows with questions of equal length
        inputs = family.solo(inputs, list(LAYOUTS).index("several"))
    with kvcompress.compress(model, "snapkv", 0.5, max_new_tokens=2, **options):
        generate(model, inputs, 2)
    assert views
    assert all(view.question_lengths == question_lengths_of(view.vision, view.lengths) for view in views)
    assert any(0 < asking < length for asking, length in zip(views[0].question_lengths, views[0].lengths, strict=True))


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen3-vl"])
def test_infinipot_v_finds_the_frames_of_a_video(family):
    """With all the room for what is new, the last frame stays whole; without frames, value norms choose."""
    model = VLM_FAMILIES[family].build()
    inputs = VLM_FAMILIES[family].video_inputs()
    runs = {}
    for name, frames in (("found", 0), ("generated", 0), ("given", 4), ("other", 8)):
        with kvcompress.compress(model, "infinipot-v", 0.5, ratio_of="vision", tar=1.0, frame_tokens=frames) as session:
            # `generate` encodes a video before it calls the model, which then is not told its grid
            generate(model, inputs, 1) if name == "generated" else model(**inputs)
        runs[name] = [[head.tolist() for head in layer[0]] for layer in kept_of(session.cache)]
    assert runs["found"] == runs["generated"] == runs["given"] != runs["other"]
    last = torch.nonzero(inputs["input_ids"][0] == VIDEO)[-4:, 0].tolist()
    assert all(set(last) <= set(head) for layer in runs["found"] for head in layer)
