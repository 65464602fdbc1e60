"""Methods that choose by the vision tower's attention: VisionZip, VisPruner, PruMerge+."""

import math

import pytest
import torch
from transformers import AutoModelForImageTextToText, LlavaConfig, LlavaNextConfig

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.tokens.prumerge import PruMergePlus
from tests.support.token_methods import (
    LENGTHS,
    as_hidden,
    batch,
    budget,
    entering,
    kept_columns,
    run,
    video_batch,
    vision_of,
)


def test_the_tower_s_layers_are_those_of_the_released_code():
    methods = kvcompress.list_methods()
    layers = {name: info.options["tower_layer"] for name, info in methods.items() if "tower_layer" in info.options}
    assert layers == {"visionzip": -2, "prumerge+": -1, "vispruner": -2, "fastvid": -1, "holitom": -1}


def patches_of(images: int) -> list[tuple[int, int] | None]:
    """(tile, patch) of each token of an image of the tiny LLaVA-OneVision, in a row of so many; None for a newline."""
    base = [(0, patch) for patch in range(4)]
    if images > 1:
        return [*base, None]
    lines = [[(tile, 2 * line + patch) for tile in (1, 2) for patch in (0, 1)] for line in (0, 1)]
    return [*base, *lines[0], None, *lines[1], None]


def tower_reference(model: torch.nn.Module, inputs: dict, layer: int) -> tuple[torch.Tensor, ...]:
    """In float64: the attention that each column's patch receives (-inf without patch), in the mean over heads; its
    keys; and its features as the tower gives them."""
    tower, ids = model.model.vision_tower, inputs["input_ids"]
    received = torch.full(ids.shape, -math.inf, dtype=torch.float64)
    keys = torch.zeros(*ids.shape, 2, 16, dtype=torch.float64)
    features = torch.zeros(*ids.shape, 32, dtype=torch.float64)
    image = 0
    for row, images in enumerate(inputs["batch_num_images"].tolist()):
        columns = (ids[row] == 1).nonzero()[:, 0].split(len(patches_of(images)))
        for place in columns if images else []:
            output = tower(inputs["pixel_values"][image], output_hidden_states=True)
            encoder = [module for module in tower.modules() if hasattr(module, "self_attn")][layer]
            states = encoder.layer_norm1(output.hidden_states[:-1][layer])
            attention = encoder.self_attn
            queries, of_tiles = (
                project(states).double().unflatten(-1, (2, 16)) for project in (attention.q_proj, attention.k_proj)
            )
            products = torch.einsum("tqhd,tkhd->thqk", queries, of_tiles) / 4
            weights = products.softmax(-1).mean((1, 2))  # (tiles, patches)
            for column, patch in zip(place.tolist(), patches_of(images), strict=True):
                if patch is not None:
                    received[row, column], keys[row, column] = weights[patch], of_tiles[patch]
                    features[row, column] = output.hidden_states[model.config.vision_feature_layer][patch]
            image += 1
    return received, keys, features


def projected(model: torch.nn.Module, features: torch.Tensor) -> torch.Tensor:
    return model.model.multi_modal_projector(features.float()).double()


UNMERGED = {"neighbours": 0, "extra_token": False}


@pytest.mark.parametrize(
    ("method", "options"), [("visionzip", {"contextual": 0.0}), ("prumerge+", UNMERGED), ("vispruner", {})]
)
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_without_merging_they_equal_the_full_model_in_which_dropped_tokens_are_hidden(method, options, ratio):
    model, inputs = batch("llava-onevision")
    kept = as_hidden(model, inputs, method, ratio, **options).kept
    vision = vision_of(inputs)
    for row, columns in enumerate(kept[0]):
        assert sum(vision[row, c].item() for c in columns if c < 61) == budget(ratio, int(vision[row].sum()))


@pytest.mark.parametrize("layer", [-1, -2])
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9])
def test_visionzip_keeps_dominant_tokens_and_merges_the_others_into_contextual_ones(ratio, layer):
    share = 0.4
    model, inputs, kept, embeddings, reached = run("visionzip", ratio, contextual=share, tower_layer=layer)
    received, keys, features = tower_reference(model, inputs, layer)
    vision, real = vision_of(inputs), inputs["attention_mask"].bool()
    for row in range(len(LENGTHS)):
        columns, patches = vision[row].nonzero()[:, 0], (received[row] > -math.inf).nonzero()[:, 0]
        expected, n = embeddings[row].double(), budget(ratio, len(columns))
        contextual = math.floor(share * n + 0.5) if n < len(patches) else 0
        # Among equals, as newlines are, the later one stays.
        order = sorted(columns.tolist(), key=lambda c, row=row: (received[row, c], c), reverse=True)
        dominant = order[: n - contextual]
        rest = [c for c in patches.tolist() if c not in dominant]
        targets = [rest[i * (len(rest) // contextual)] for i in range(contextual)]
        mean_keys = keys[row].mean(1)
        assigned = {target: [] for target in targets}
        for other in set(rest) - set(targets) if targets else []:
            similarity = [torch.cosine_similarity(mean_keys[other], mean_keys[t], dim=0) for t in targets]
            assigned[targets[similarity.index(max(similarity))]].append(other)
        stays = sorted([*dominant, *targets, *(real[row] & ~vision[row]).nonzero()[:, 0].tolist()])
        assert kept[row] == stays
        expected = expected.clone()
        for target, others in assigned.items():
            merged = features[row, others].mean(0) if others else 0.0
            expected[target] = projected(model, features[row, target] + merged)
        torch.testing.assert_close(reached[row, -len(stays) :].double(), expected[stays], atol=1e-5, rtol=0)


def test_prumerge_may_let_the_outliers_set_the_number_up_to_the_budget():
    model, inputs = batch("llava-onevision")
    as_hidden(model, inputs, "prumerge+", None, preset="adaptive", neighbours=0, extra_token=False)
    with kvcompress.compress(model, "prumerge+", budget=2, count="outliers") as session:
        generate(model, inputs, 1)
    kept = kept_columns(session.cache)[0]
    assert [int(vision[of_row].sum()) for vision, of_row in zip(vision_of(inputs), kept, strict=True)][:3] == [2, 2, 2]


def test_the_variants_of_prumerge_see_other_attention():
    found = [run("prumerge+", 0.5, variant=variant)[2] for variant in ("code", "heads")]
    assert found[0] != found[1]


def test_the_tower_s_methods_are_for_images():
    model, inputs, _ = video_batch("llava-onevision", [8])
    with kvcompress.compress(model, "visionzip", 0.5), pytest.raises(kvcompress.KVCompressError, match="no video"):
        generate(model, inputs, 1)


@pytest.mark.parametrize("method", ["visionzip", "prumerge+", "vispruner"])
def test_what_the_tower_saw_of_an_earlier_image_is_not_taken_for_the_present_one(method):
    model, inputs = batch("llava-onevision", [40], [1])
    without = {name: inputs[name] for name in ("input_ids", "attention_mask")}  # the image's tokens, no pixels
    with kvcompress.compress(model, method, 0.5):
        model(**inputs)
        with pytest.raises(kvcompress.KVCompressError, match="and the vision tower encoded 0"):
            model(**without)


@pytest.mark.parametrize("next_too", [False, True], ids=["llava", "llava-next"])
@pytest.mark.parametrize("method", ["visionzip", "prumerge+"])
def test_a_tower_with_a_class_token_is_asked_through_it(method, next_too, monkeypatch):
    tower = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3}
    text = {"model_type": "llama", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 32}
    config = (LlavaNextConfig if next_too else LlavaConfig)(
        text_config={**text, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0},
        vision_config={**tower, "num_attention_heads": 2, "image_size": 16, "patch_size": 4},
        image_token_index=1,
        vision_feature_layer=-2,
        **({"image_grid_pinpoints": [[16, 16]]} if next_too else {"image_seq_length": 16}),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()
    patches = 16 + 20 if next_too else 16  # base tile; one tile with a newline after each line
    ids = torch.tensor([[0] * 3 + [9, *[1] * patches, 10, 11], [20, 21, 22, 9, *[1] * patches, 10, 12]])
    pixels = torch.randn(2, *((2,) if next_too else ()), 3, 16, 16, generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "pixel_values": pixels}
    if next_too:
        inputs["image_sizes"] = torch.tensor([[16, 16]] * 2)
    model.model.vision_tower.set_attn_implementation("eager")
    weights = model.model.vision_tower(pixels.flatten(0, -4), output_attentions=True).attentions[-2]
    model.model.vision_tower.set_attn_implementation("sdpa")
    received = weights.double().mean(1)[:, 0, 1:]  # (tiles, patches)
    if method == "prumerge+":
        seen = []

        def score(self, tokens):
            seen.append(tokens.tower.received.double())
            return tokens.tower.received

        monkeypatch.setattr(PruMergePlus, "score", score)
        as_hidden(model, inputs, method, 0.25, **UNMERGED, variant="heads", tower_layer=-2)
        for row, found in enumerate(seen[0]):
            tiles = received[2 * row : 2 * row + 2] if next_too else received[row : row + 1]
            torch.testing.assert_close(found[found.isfinite()], tiles.flatten(), atol=1e-6, rtol=0)
        return
    options = {"contextual": 0.0, "tower_layer": -2}
    with entering(model, 0) as states, kvcompress.compress(model, method, 0.25, **options) as session:
        generate(model, inputs, 1)
    kept = kept_columns(session.cache)
    classes = model.model.vision_tower(pixels.flatten(0, -4), output_hidden_states=True).hidden_states[-2][:, :1]
    for row in range(2):
        of_row, tiles = received[row], [row]
        if next_too:
            tiles = [2 * row, 2 * row + 1]
            lines = torch.nn.functional.pad(received[2 * row + 1].view(4, 4), (0, 1), value=-1.0)
            of_row = torch.cat([received[2 * row], lines.flatten()])
        # The first dominant tokens are the tiles' class tokens, in the places of the first dropped patches.
        best = of_row.topk(budget(0.25, patches) - len(tiles)).indices.tolist()
        places = [i for i in range(patches) if i not in best and of_row[i] >= 0][: len(tiles)]
        stays = sorted([*best, *places])
        assert [c - 4 for c in kept[0][row] if 4 <= c < 4 + patches] == stays
        ours = states[0][row, -len(stays) - 2 : -2][[stays.index(i) for i in places]]
        torch.testing.assert_close(ours, model.model.multi_modal_projector(classes[tiles])[:, 0], atol=1e-5, rtol=0)
