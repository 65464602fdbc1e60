"""Pruning one picture or video at a time keeps what `kvcompress.compress` keeps of a prompt that shows only it."""

import dataclasses

import pytest
import torch

import kvcompress
from kvcompress.engines.media import MediaPruner, asked_of, carried, obstacle_of
from kvcompress.methods import list_methods, make_method
from kvcompress.tokens.base import TokenMethod
from tests import engines_page
from tests.support.families import FAMILIES

CARRIED = ["divprune", "evs", "vidcom2"]


def states_of(model, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The embeddings of a prompt's vision tokens, as they enter the first layer."""
    seen = []
    handle = model.model.language_model.layers[0].register_forward_pre_hook(
        lambda layer, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    model(**inputs)
    handle.remove()
    ids = inputs["input_ids"][0]
    return seen[0][0, (ids == model.config.image_token_id) | (ids == model.config.video_token_id)]


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl"])
@pytest.mark.parametrize(
    ("method", "video"),
    [("divprune", False), *((method, True) for method in CARRIED)],  # others prune no pictures
)
def test_the_same_tokens_stay_as_in_a_prompt(family, method, video):
    model = FAMILIES[family].build()
    tiny = FAMILIES[family]
    inputs = tiny.video_inputs() if video else tiny.inputs(model, lengths=[30], images=[1])
    with kvcompress.compress(model, method, ratio=0.5) as session:
        model.generate(**inputs, max_new_tokens=1)
        kept = session.cache.kept_indices(0)[0][0]
    ids = inputs["input_ids"][0]
    vision = ((ids == model.config.image_token_id) | (ids == model.config.video_token_id)).nonzero()[:, 0]
    states = states_of(model, inputs)
    frames = int(inputs["video_grid_thw"][0, 0]) if video else None
    stays, merged = MediaPruner.of(method, ratio=0.5).prune(states, frames)
    assert vision[stays].tolist() == sorted(set(kept.tolist()) & set(vision.tolist()))
    assert torch.equal(merged, states)


def test_the_methods_that_choose_by_embeddings_are_carried():
    assert [name for name in carried() if name in list_methods()] == CARRIED
    assert obstacle_of(make_method("cdpruner", relevance="none")) is None
    assert obstacle_of(make_method("dycoke", decode_drop=0)) is None


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("snapkv", {}, "it evicts cache entries"),
        ("fastv", {}, "inside the language model"),
        ("dart", {}, "inside the language model"),
        ("visionzip", {}, "vision tower"),
        ("fastvid", {}, "vision tower"),
        ("holitom", {}, "vision tower"),
        ("dycoke", {}, "decode steps"),
        ("cdpruner", {}, "rest of the prompt"),
        ("random-tokens", {}, "rest of the prompt"),
    ],
)
def test_any_other_is_an_error_that_says_why(method, options, why):
    with pytest.raises(kvcompress.KVCompressError, match=why) as raised:
        MediaPruner.of(method, ratio=0.5, **options)
    assert "\n" not in str(raised.value)


def test_a_method_on_frames_keeps_pictures():
    assert MediaPruner.of("evs", preset="q70").kept(100, is_video=True) == 30
    pruner = MediaPruner.of("evs", ratio=0.25)
    assert (pruner.kept(40, is_video=False), pruner.kept(40, is_video=True)) == (40, 10)
    stays, _ = pruner.prune(torch.randn(40, 8))
    assert stays.all()


def test_a_video_too_short_for_the_budget_is_known_from_its_size():
    pruner = MediaPruner.of("evs", ratio=0.25)
    pruner.rehearse(40, 4)  # the first frame is a quarter
    with pytest.raises(kvcompress.KVCompressError, match="the first frame of a video stay"):
        pruner.rehearse(40, 2)


@dataclasses.dataclass(frozen=True)
class Halves(TokenMethod):
    """Merges each token into its neighbour, and keeps one more than it is asked for."""

    more: int = 0

    sees = "embeddings"

    def layers(self, num_layers):
        return [0]

    def score(self, tokens):
        return torch.zeros(tokens.vision.shape)

    def choose(self, scores, tokens):
        chosen = tokens.vision & (tokens.vision.cumsum(1) <= tokens.budgets[0] + self.more)
        return chosen, tokens.hidden * 0.5


def test_merged_states_come_back_and_a_wrong_number_is_an_error():
    budget = kvcompress.Budget(ratio=0.5)
    states = torch.randn(10, 4)
    stays, merged = MediaPruner("halves", Halves(), budget).prune(states)
    assert stays.tolist() == [True] * 5 + [False] * 5
    assert torch.equal(merged, states * 0.5)
    with pytest.raises(kvcompress.KVCompressError, match="keeps 6 of 10 tokens instead of 5"):
        MediaPruner("halves", Halves(more=1), budget).prune(states)


def test_the_environment_asks():
    assert asked_of({}) == {}
    assert asked_of({"KVCOMPRESS_METHOD": "evs", "KVCOMPRESS_RATIO": "0.25"}) == {"method": "evs", "ratio": 0.25}
    with pytest.raises(kvcompress.KVCompressError, match="needs KVCOMPRESS_METHOD"):
        asked_of({"KVCOMPRESS_RATIO": "0.25"})
    with pytest.raises(kvcompress.KVCompressError, match="KVCOMPRESS_RATIO: 'a lot' is not a number"):
        asked_of({"KVCOMPRESS_METHOD": "evs", "KVCOMPRESS_RATIO": "a lot"})


def test_the_page_has_the_table_of_the_methods():
    text = engines_page.PAGE.read_text(encoding="utf-8")
    assert text == engines_page.page(text), "run: python -m tests.engines_page"
