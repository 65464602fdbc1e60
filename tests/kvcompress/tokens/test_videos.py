"""FastVID and HoliTom: a video's tokens by the vision tower's attention and by likeness over time."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText, LlavaOnevisionConfig

import kvcompress
from kvcompress.check.reference import generate
from kvcompress.tokens.holitom import shares
from tests.support.examples import paired
from tests.support.token_methods import NEW, TOLERANCE, as_hidden, budget, entering, kept_columns, video_batch

FRAMES, SIDE = 6, 6  # patches per side, of which 2 x 2 become a token
PER_FRAME = (SIDE // 2) ** 2
METHODS = ["fastvid", "holitom"]
# Nothing is merged: FastVID has no contextual tokens, and no two tokens of HoliTom are alike.
UNMERGED = {"fastvid": {"contextual": 0.0}, "holitom": {"similarity": 1.0}}


def video_prompts(texts: list[int], like: float = 0.0) -> tuple[torch.nn.Module, dict, list[list[list[int]]]]:
    """A LLaVA-OneVision with a tower of 6 x 6 patches; left-padded prompts with a video each and texts of such
    lengths; and the columns of each row's frames. `like`: how much of each frame is the first."""
    config = LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 32}
        | {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0},
        vision_config={"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32}
        | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 4 * SIDE, "patch_size": 4}
        | {"vision_use_head": False},
        image_token_index=1,
        video_token_index=2,
        image_grid_pinpoints=[[4 * SIDE, 4 * SIDE]],
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.data.normal_(std=(3 if "q_proj" in name else 1) * weight[0].numel() ** -0.5)
        pixels = torch.randn(len(texts), FRAMES, 3, 4 * SIDE, 4 * SIDE)
        pixels = like * pixels[:, :1] + (1 - like) * pixels
    rows = [[9, *[2] * (FRAMES * PER_FRAME + 1), *range(20, 20 + text)] for text in texts]
    ids = torch.tensor([[0] * (max(map(len, rows)) - len(row)) + row for row in rows])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "pixel_values_videos": pixels}
    columns = [(row == 2).nonzero()[:-1, 0].view(FRAMES, PER_FRAME).tolist() for row in ids]
    return model, inputs, columns


def received(model: torch.nn.Module, frames: torch.Tensor, of_mean_query: bool) -> torch.Tensor:
    """The attention that each token of frames (frames, 3, height, width) receives in the tower's last layer."""
    tower = model.model.vision_tower
    encoder = [module for module in tower.modules() if hasattr(module, "self_attn")][-1]
    states = encoder.layer_norm1(tower(frames, output_hidden_states=True).hidden_states[-2])
    queries, keys = (
        project(states).double().unflatten(-1, (2, 16))
        for project in (encoder.self_attn.q_proj, encoder.self_attn.k_proj)
    )
    queries = queries.mean(1, keepdim=True) if of_mean_query else queries
    weights = (torch.einsum("tqhd,tkhd->thqk", queries, keys) / 4).softmax(-1).mean((1, 2))
    return F.avg_pool2d(weights.view(-1, 1, SIDE, SIDE), 2).flatten(1)  # bilinear, to half the size, is this mean


@pytest.mark.parametrize("ratio", [0.3, 0.7])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_merged_is_what_the_tower_attends_to_most_in_each_frame(method, ratio):
    model, inputs, of_frames = video_prompts([5, 9])
    kept = as_hidden(model, inputs, method, ratio, **UNMERGED[method]).kept
    n = budget(ratio, FRAMES * PER_FRAME + 1) - 1
    for row, columns in enumerate(of_frames):
        attention = received(model, inputs["pixel_values_videos"][row], method == "fastvid")
        stays = [[c for c in frame if c in kept[0][row]] for frame in columns]
        assert sum(map(len, stays)) == n
        assert {len(frame) for frame in stays} <= {n // FRAMES, -(-n // FRAMES)}
        for weights, frame, chosen in zip(attention, columns, stays, strict=True):
            assert chosen == sorted(frame[i] for i in weights.topk(len(chosen)).indices.tolist())


@pytest.mark.parametrize(("ratio", "like"), paired([0.05, 0.1, 0.33, 0.5, 0.9], [0.0, 0.9, 1.0]))
@pytest.mark.parametrize("method", METHODS)
def test_a_row_keeps_its_budget_whatever_is_merged_and_runs_as_alone(method, ratio, like):
    model, inputs, of_frames = video_prompts([5, 9], like)
    with kvcompress.compress(model, method, ratio) as session:
        tokens, logits = generate(model, inputs, NEW)
    kept = kept_columns(session.cache)[0]
    for row, columns in enumerate(of_frames):
        shown = set(itertools.chain(*columns))
        assert len(shown & set(kept[row])) == budget(ratio, FRAMES * PER_FRAME + 1) - 1
        length = int(inputs["attention_mask"][row].sum())
        solo = {name: part[row : row + 1, -length:] for name, part in inputs.items() if part.ndim == 2}
        solo["pixel_values_videos"] = inputs["pixel_values_videos"][row : row + 1]
        with kvcompress.compress(model, method, ratio) as session:
            _, alone = generate(model, solo, NEW, forced=tokens[row : row + 1])
        torch.testing.assert_close(alone[0], logits[row], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_ratio_one_runs_as_the_full_model(method):
    model, inputs, _ = video_prompts([5, 9], like=1.0)
    tokens, expected = generate(model, inputs, NEW)
    options = {"inner_layer": 2} if method == "holitom" else {}
    with kvcompress.compress(model, method, 1.0, **options):
        _, logits = generate(model, inputs, NEW, forced=tokens)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("method", METHODS)
def test_an_image_beside_the_video_stays_and_counts(method):
    model, inputs, _ = video_prompts([5])
    image = [1] * (2 * SIDE * SIDE + SIDE)  # the whole, and one tile with a newline after each line
    ids = torch.cat([torch.tensor([[9, *image]]), inputs["input_ids"]], 1)
    inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_sizes": torch.tensor([[4 * SIDE] * 2])}
    inputs["pixel_values"] = torch.randn(1, 2, 3, 4 * SIDE, 4 * SIDE, generator=torch.Generator().manual_seed(0))
    with kvcompress.compress(model, method, 0.8) as session:
        generate(model, inputs, 1)
    (kept,) = kept_columns(session.cache)[0]
    assert set(range(1, 1 + len(image))) <= set(kept)
    shown = len(image) + FRAMES * PER_FRAME + 1
    assert sum(int(ids[0, c]) in (1, 2) for c in kept if c < ids.shape[1]) == budget(0.8, shown)


def test_fastvid_fills_an_anchor_that_has_no_room_with_salient_tokens_of_the_other_frames():
    model, inputs, of_frames = video_prompts([5])
    options = {"segments": 1, "similarity": -1.0, "contextual": 1.0, "anchor_interval": FRAMES}
    with kvcompress.compress(model, "fastvid", 0.5, **options) as session:
        generate(model, inputs, 1)
    kept = kept_columns(session.cache)[0][0]
    n = budget(0.5, FRAMES * PER_FRAME + 1) - 1
    attention = received(model, inputs["pixel_values_videos"][0], of_mean_query=True)[:-1].flatten()
    others = list(itertools.chain(*of_frames[0][:-1]))
    more = [others[i] for i in attention.topk(n - PER_FRAME).indices.tolist()]
    shown = set(itertools.chain(*of_frames[0]))
    assert [c for c in kept if c in shown] == sorted([*more, *of_frames[0][-1]])


def test_holitom_merges_a_second_time_within_the_language_model():
    model, inputs, _ = video_prompts([5, 9])
    whole = FRAMES * PER_FRAME + 1
    with entering(model, 2) as states:
        with kvcompress.compress(model, "holitom", 0.5) as session:
            generate(model, inputs, 1)
        entered = kept_columns(session.cache)[0]
        with kvcompress.compress(model, "holitom", 0.5, inner_layer=2, inner_drop=0.6) as session:
            generate(model, inputs, 1)
    kept = kept_columns(session.cache)
    assert kept[0] == kept[1] == entered
    assert kept[2] == kept[3]
    vision = inputs["input_ids"] == 2
    for row in range(2):
        before, after = ([c for c in layer[row] if c < vision.shape[1] and vision[row, c]] for layer in kept[1:3])
        assert (len(before), len(after)) == (budget(0.5, whole), round(0.4 * budget(0.5, whole)))
        expected = dict(zip(entered[row], states[0][row, -len(entered[row]) :].double(), strict=True))
        plain = dict(expected)
        for column in before:
            if column not in after:
                nearest = max(after, key=lambda c: torch.cosine_similarity(plain[c], plain[column], dim=0).item())
                expected[nearest] = (expected[nearest] + plain[column]) / 2
        ours = states[1][row, -len(kept[2][row]) :].double()
        torch.testing.assert_close(ours, torch.stack([expected[c] for c in kept[2][row]]), atol=1e-5, rtol=0)


def test_holitom_shares_out_to_the_token():
    for total in range(1, 40):
        counts = shares([5, 5, 5, 5, 5, 3, 3], [0, 7, 2], total)
        assert sum(counts) == total
        assert all(count <= size for count, size in zip(counts, [5, 5, 5, 5, 5, 3, 3, 0, 7, 2], strict=True))
    assert shares([4] * 6, [], 3) == [1, 0, 1, 0, 1, 0]  # not the first three frames


@pytest.mark.parametrize("method", METHODS)
def test_they_need_a_video_and_room_for_what_stays(method):
    error = kvcompress.KVCompressError
    model, inputs, _ = video_prompts([5])
    with kvcompress.compress(model, method, budget=1) as session:
        generate(model, inputs, 1)
    assert 2 in inputs["input_ids"][0, kept_columns(session.cache)[0][0][:2]]  # the newline
    model, inputs, _ = video_batch("qwen2-vl", [4])
    with pytest.raises(error, match="attention to videos of a qwen2_vl model; there is for llava_onevision"):
        kvcompress.compress(model, method, 0.5)
    model, inputs, _ = video_prompts([5])
    cache = kvcompress.CompressedCache(model.config, method, 0.5)
    with kvcompress.attach(model), pytest.raises(error, match=r"works inside kvcompress.compress\(...\)"):
        model.generate(**inputs, past_key_values=cache, max_new_tokens=1)


def test_the_presets_keep_whole_frames_shares():
    presets = kvcompress.list_methods()["fastvid"].presets
    for name, percent in (("r10", 10), ("r25", 25)):
        kept = presets[name]["ratio"] * (32 * 196 + 1)
        assert math.floor(kept + 0.5) == 32 * int(196 * percent / 100) + 1
