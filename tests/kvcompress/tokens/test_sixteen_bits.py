"""Token methods on a model in 16 bits, and under autocast: what they compute is in fp32."""

import copy
import dataclasses

import pytest
import torch

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.tokens import Tokens
from tests.support.families import FAMILIES

METHODS = {
    name: info.cls for name, info in kvcompress.list_methods().items() if issubclass(info.cls, kvcompress.TokenMethod)
}
OPTIONS = {"framefusion": {"similarity": -1.0}, "holitom": {"inner_layer": 2}, "dycoke": {"layer": 1}}
RATIO, NEW = 0.7, 3
ONEVISION = FAMILIES["llava-onevision"]


def inputs_for(method: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    of_videos = METHODS[method].sees in ("frames", "video")
    given = ONEVISION.video_inputs() if of_videos else ONEVISION.inputs(model, [40, 26], [1, 1])
    return {name: part.to(model.dtype) if part.is_floating_point() else part for name, part in given.items()}


def in_fp32(states: torch.Tensor | None) -> torch.Tensor | None:
    return states.float() if isinstance(states, torch.Tensor) and states.is_floating_point() else states


def of_fp32(tokens: Tokens) -> Tokens:
    """The same numbers in fp32; the projector belongs to the model and stays in 16 bits."""
    attention, tower = tokens.attention, tokens.tower
    if attention is not None:
        attention = dataclasses.replace(attention, queries=attention.queries.float(), keys=attention.keys.float())
    if tower is not None:
        project, dtype = tower.project, tower.features.dtype
        parts = {"keys": tower.keys.float(), "features": tower.features.float()}
        classes = [each.float() for each in tower.classes]
        tower = dataclasses.replace(tower, **parts, classes=classes, project=lambda x: project(x.to(dtype)).float())
    return dataclasses.replace(tokens, hidden=in_fp32(tokens.hidden), attention=attention, tower=tower)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_chosen_of_states_in_16_bits_is_what_is_chosen_of_the_same_numbers_in_fp32(method, dtype, monkeypatch):
    cls, model = METHODS[method], copy.deepcopy(ONEVISION.build(4)).to(dtype)
    score, choose, prepare, received = cls.score, cls.choose, cls.prepare, cls.received
    compared = []

    def compare_score(self, tokens):
        scores = score(self, tokens)
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores[tokens.vision], score(self, of_fp32(tokens))[tokens.vision])
        return scores

    def compare_choose(self, scores, tokens):
        (chosen, merged), (expected, as_fp32) = choose(self, scores, tokens), choose(self, scores, of_fp32(tokens))
        assert torch.equal(chosen, expected)
        assert merged.dtype == dtype
        torch.testing.assert_close(merged[chosen], as_fp32.to(dtype)[chosen])
        compared.append(chosen)
        return chosen, merged

    def compare_prepare(self, tokens):
        prepared, expected = prepare(self, tokens), prepare(self, of_fp32(tokens))
        assert prepared is expected is None or torch.equal(prepared, expected)
        return prepared

    def compare_received(self, queries, keys, has_class):
        found = received(self, queries, keys, has_class)
        torch.testing.assert_close(found, received(self, queries.float(), keys.float(), has_class))
        return found

    for name, compare in (
        *(("score", compare_score), ("choose", compare_choose)),
        *(("prepare", compare_prepare), ("received", compare_received)),
    ):
        monkeypatch.setattr(cls, name, compare)
    with kvcompress.compress(model, method, RATIO, **OPTIONS.get(method, {})):
        _, logits = generate(model, inputs_for(method, model), NEW)
    assert compared
    assert logits.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_under_autocast_a_token_method_computes_in_dtypes_of_its_own(method, monkeypatch):
    """Attention to patches would be bfloat16, of which `prumerge+` cannot take quantiles; the projector goes on as in
    the model."""
    cls, model, is_autocast = METHODS[method], ONEVISION.build(4), []

    def noting(function):
        def call(*args):
            is_autocast.append(torch.is_autocast_enabled("cpu"))
            return function(*args)

        return call

    for name in ("score", "choose", "prepare", "received", "hide"):
        monkeypatch.setattr(cls, name, noting(getattr(cls, name)))
    projected, project = [], type(model.base_model.multi_modal_projector).forward

    def noting_projection(*args):
        projected.append(torch.is_autocast_enabled("cpu"))
        return project(*args)

    monkeypatch.setattr(type(model.base_model.multi_modal_projector), "forward", noting_projection)
    inputs = inputs_for(method, model)
    with (
        torch.autocast("cpu", torch.bfloat16),
        kvcompress.compress(model, method, RATIO, **OPTIONS.get(method, {})) as session,
    ):
        generate(model, inputs, NEW)
        row = inputs if len(inputs["input_ids"]) == 1 else ONEVISION.solo(inputs, 0)
        assert next(session.generate_many([row], slots=1, max_new_tokens=NEW)).error is None
    assert len(is_autocast) >= 6
    assert not any(is_autocast)
    assert projected
    assert all(projected)
