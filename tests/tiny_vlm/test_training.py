"""The bundled model's world, its training, its shipped checkpoint and data."""

import io
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

import kvcompress
from lmms_eval_plugins.tasks.many import PER_PICTURE
from lmms_eval_plugins.tiny_vlm import CHECKPOINT
from lmms_eval_plugins.tiny_vlm.accuracy import Reader, by_kind
from lmms_eval_plugins.tiny_vlm.dataset import COLOR, HEADLINE, MANY, read_examples
from lmms_eval_plugins.tiny_vlm.questions import POST_PROMPT
from tiny_vlm import signs, train
from tiny_vlm.curriculum import STAGES, Stage, StageData
from tiny_vlm.dataset import compress_image, textvqa_table
from tiny_vlm.editions import EDITIONS, Mixture, Part, scaled
from tiny_vlm.examples import draw_examples, draw_shared
from tiny_vlm.export import export
from tiny_vlm.modeling import IMAGE_TOKENS, build_model, build_processor, build_tokenizer
from tiny_vlm.packing import IGNORED, Packer, packed_forward
from tiny_vlm.regimes import WORDS
from tiny_vlm.signs import COLOR_KIND, GRID, HEADLINE_KINDS, PATCH, SIDE
from tiny_vlm.train import Trainer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def reader():
    return Reader(CHECKPOINT)


# -- the world


@pytest.mark.parametrize("draw", [signs.draw_scene, signs.draw_packed_scene])
def test_the_same_seed_draws_the_same_scene_and_another_seed_another(draw):
    first, again, other = draw(Random("1")), draw(Random("1")), draw(Random("2"))
    assert np.array_equal(first.pixels, again.pixels)
    assert np.array_equal(first.labels, again.labels)
    assert first.signs == again.signs
    assert not np.array_equal(first.pixels, other.pixels)


def test_no_question_has_two_answers():
    for seed in range(200):
        scene = signs.draw_scene(Random(seed))
        colors = [sign.color for sign in scene.signs]
        texts = [line for sign in scene.signs for line in sign.lines]
        assert len(set(colors)) == len(colors)
        assert not any(a.startswith(b) for a in texts for b in texts if a is not b)
        asked = [question.text for question in signs.questions(scene.signs)]
        assert len(set(asked)) == len(asked)


def test_signs_lie_anywhere_not_only_near_the_patch_grid(monkeypatch):
    places = []
    write = signs.Canvas.write
    monkeypatch.setattr(
        signs.Canvas, "write", lambda self, place, *rest: (places.append(place), write(self, place, *rest))
    )
    for seed in range(200):
        signs.draw_scene(Random(seed))
    for axis in (0, 1):
        offsets = np.bincount([place[axis] % PATCH for place in places], minlength=PATCH) / len(places)
        assert offsets.min() > 0.03  # of 1 / 16 each


@pytest.mark.parametrize("jitter", [0, 3])
def test_packed_signs_fill_the_picture_and_lie_up_to_the_jitter_off_the_grid(monkeypatch, jitter):
    drawn = []
    write = signs.Canvas.write
    monkeypatch.setattr(signs.Canvas, "write", lambda self, *given: (drawn.append(given[:2]), write(self, *given)))
    off = [set(), set()]
    for seed in range(40):
        drawn.clear()
        signs.draw_packed_scene(Random(seed), jitter)
        assert len(drawn) > GRID / 2
        taken = set()
        for place, lines in drawn:
            column, row = ((part + PATCH // 2) // PATCH for part in place)
            for axis, part in enumerate(place):
                off[axis].add((part + PATCH // 2) % PATCH - PATCH // 2)
            cells = {(row + down, column + right) for down, line in enumerate(lines) for right in range(len(line))}
            assert not cells & taken, "no sign lies over another"
            assert all(0 < part < GRID for cell in cells for part in cell)
            taken |= cells
    assert off == [set(range(-jitter, jitter + 1))] * 2


def test_a_shorter_training_still_has_two_steps_of_each_stage():
    stages = scaled(STAGES, 1e-6)
    assert [stage.steps for stage in stages] == [2] * len(STAGES)
    assert [stage.steps for stage in scaled(STAGES, 0.5)] == [round(stage.steps / 2) for stage in STAGES]


def test_a_scene_with_fewer_questions_than_a_stage_asks_is_asked_all(tokenizer):
    stage = replace(STAGES[-1], questions=500, images=2, packed_share=0.0)
    (batch,) = StageData(stage, 0, Packer(tokenizer), parts=1)[0]
    assert all(0 < len(kinds) < 500 for kinds in batch.kinds)


def test_labels_name_the_character_under_each_patch():
    canvas = signs.Canvas(Random(0))
    canvas.write((2 * PATCH + 5, 3 * PATCH + 5), ("ab", "7"), "blue")
    glyph, color, index, last, left, above = canvas.labels
    places = list(zip(*np.nonzero(glyph), strict=True))
    assert places == [(3, 2), (3, 3), (4, 2)]
    names = " " + signs.CHARACTERS
    assert [names[glyph[place]] for place in places] == ["a", "b", "7"]
    assert [names[left[place]] for place in places] == [" ", "a", " "]
    assert [names[above[place]] for place in places] == [" ", " ", "a"]
    assert [index[place] for place in places] == [1, 2, 1]
    assert [last[place] for place in places] == [0, 1, 1]
    assert {color[place] for place in places} == {1 + list(signs.COLORS).index("blue")}


# -- tokenizer and processor


def test_headline_answers_take_one_token_per_character_and_colours_one_token(tokenizer):
    for kind in HEADLINE_KINDS:
        for example in draw_examples(20, (kind,), f"tokens-{kind}"):
            answer = example.question.answer
            assert 2 <= len(answer) <= 4
            assert len(tokenizer(answer)["input_ids"]) == len(answer)
    for color in signs.COLORS:
        assert len(tokenizer(color)["input_ids"]) == 1
        assert len(tokenizer(f" {color}")["input_ids"]) == 1


def test_the_tokenizer_spells_whatever_it_does_not_know(tokenizer):
    assert tokenizer.decode(tokenizer("Wörd 42, naïve: 漢 redo")["input_ids"]) == "wörd 42, naïve: 漢 redo"
    assert len(tokenizer("redo")["input_ids"]) == 4


def test_an_image_is_351_tokens_and_the_prompt_about_380(tokenizer):
    example = draw_examples(1, ("w2n",), "length")[0]
    inputs = build_processor(tokenizer)(
        images=[Image.fromarray(example.pixels)], text=["<image>\n" + example.question.text + POST_PROMPT]
    )
    assert inputs["input_ids"][0].count(tokenizer.convert_tokens_to_ids("<image>")) == IMAGE_TOKENS == 351
    assert 360 < len(inputs["input_ids"][0]) < 400


# -- training


def test_packed_questions_have_the_logits_of_separate_prompts(tokenizer):
    packer, processor = Packer(tokenizer), build_processor(tokenizer)
    model = build_model(tokenizer, seed=0).eval()
    scenes = [signs.draw_scene(Random(seed)) for seed in range(2)]
    asked = [signs.questions(scene.signs)[:count] for scene, count in zip(scenes, (3, 5), strict=True)]
    pixels = torch.from_numpy(np.stack([scene.pixels for scene in scenes])).permute(0, 3, 1, 2)
    batch = packer.batch(pixels, asked, torch.zeros(2, 6, GRID, GRID, dtype=torch.long), post_prompt=True)
    prefix = batch.prefix
    model.set_attn_implementation("packed")
    with torch.no_grad():
        _, _, hidden = packed_forward(model, batch)
    model.set_attn_implementation("sdpa")
    for row, number in ((0, 3), (1, 1), (1, 5)):
        question = asked[row][number - 1]
        here = batch.segments[row] == number
        answer = packer.encode(f"{question.answer}<|im_end|>")
        message = {
            "role": "user",
            "content": [
                {"type": "image", "image": Image.fromarray(scenes[row].pixels)},
                {"type": "text", "text": question.text.capitalize() + POST_PROMPT},
            ],
        }
        inputs = processor.apply_chat_template(
            [message], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
        ids = torch.cat((inputs["input_ids"], torch.tensor([answer])), 1)
        assert ids[0, prefix:].tolist() == batch.ids[row, here].tolist()
        assert batch.targets[row, here][-len(answer) - 1 : -1].tolist() == answer
        with torch.no_grad():
            expected = model(
                input_ids=ids, pixel_values=inputs["pixel_values"], image_sizes=inputs["image_sizes"]
            ).logits[0, prefix:]
        torch.testing.assert_close(model.lm_head(hidden[-1][row, here]), expected, atol=1e-5, rtol=0)


SHORT_STAGES = (
    Stage("vision", steps=2, images=2, packed_share=1.0, jitter_grows_until=0.5),
    Stage("align", steps=2, images=2, packed_share=0.5),
    Stage("questions", steps=2, images=2, packed_share=0.0, questions=2),
)


SHORT_MIXTURES = (
    Mixture("frames", 1, (Part("packed_frame", 60), Part("packed_picture", 200)), tower_scale=1.0),
    Mixture(
        "short",
        2,
        (
            Part("needle", 60, 2, {"tokens": (60, 60)}),
            Part("video", 100, 2, {"frames": (8, 8), "signs": (3, 3)}),
        ),
        post_prompt_share=0.5,
        inserts=3,
    ),
)


def short_trainer(out: Path, seed: int = 0, stages=SHORT_STAGES, tokenizer=None) -> Trainer:
    out.mkdir(exist_ok=True)
    return Trainer(out, stages, seed, torch.device("cpu"), workers=0, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (tuple(replace(stage, steps=steps) for stage, steps in zip(SHORT_STAGES, (1, 2, 1), strict=True)), None),
        pytest.param(SHORT_MIXTURES, WORDS, marks=pytest.mark.slow),
    ],
    ids=["stages", "mixtures"],
)
def test_training_that_was_cut_after_every_step_ends_with_the_same_weights(tmp_path, stages, words):
    tokenizer = words and build_tokenizer(words, 8192)
    whole = short_trainer(tmp_path / "whole", stages=stages, tokenizer=tokenizer)
    assert whole.run(deadline=float("inf"))
    for _ in range(5):
        cut = short_trainer(tmp_path / "cut", stages=stages, tokenizer=tokenizer)
        if cut.state_file.exists():
            cut.resume()
        if cut.run(deadline=0.0):
            break
    else:
        pytest.fail("at most four steps, one at a time, did not finish")
    expected = dict(whole.model.named_parameters())
    assert all(torch.equal(value, expected[name].float()) for name, value in cut.model.named_parameters())
    whole_log, cut_log = (
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("whole", "cut")
    )
    assert [(row["stage"], row["step"]) for row in cut_log] == [(row["stage"], row["step"]) for row in whole_log]


def test_a_question_counts_as_right_where_every_token_of_its_answer_is(tokenizer, tmp_path, monkeypatch):
    (batch,) = StageData(replace(SHORT_STAGES[2], images=1), 0, Packer(tokenizer), parts=1)[0]
    asked = (batch.targets != IGNORED).sum()
    (kinds,) = batch.kinds
    all_right = train._question_scores(torch.ones(asked, dtype=torch.bool), batch)
    assert all_right == {kind: [1.0] * kinds.count(kind) for kind in kinds}
    one_wrong = torch.ones(asked, dtype=torch.bool)
    one_wrong[-1] = False
    scores = [score for of_kind in train._question_scores(one_wrong, batch).values() for score in of_kind]
    assert sorted(scores) == [0.0] + [1.0] * (len(kinds) - 1)

    def perfect(model, hidden, batch):
        targets = batch.targets[batch.targets != IGNORED]
        return 100.0 * torch.nn.functional.one_hot(targets, len(tokenizer)).float(), targets

    monkeypatch.setattr(train, "answer_logits", perfect)
    _, logged = short_trainer(tmp_path)._gradients(SHORT_STAGES[2], batch)
    assert {kind: logged[kind] for kind in kinds} == all_right


def test_the_training_command_takes_the_device_that_is_there(tmp_path, monkeypatch):
    made = []

    class NoTrainer:
        state_file = tmp_path / "none"

        def __init__(self, *given):
            made.append(given)

        def run(self, deadline):
            return False

    monkeypatch.setattr(train, "Trainer", NoTrainer)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr("os.nice", lambda by: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["train", "--out", str(tmp_path / "out"), "--max-minutes", "0"])
    train.main()
    assert made[0][3] == torch.device("cpu")


def test_training_does_not_continue_what_another_recipe_began(tmp_path, tokenizer):
    short_trainer(tmp_path).run(deadline=0.0)
    with pytest.raises(ValueError, match="seed 0"):
        short_trainer(tmp_path, seed=1).resume()
    with pytest.raises(ValueError, match=f"{len(tokenizer)} tokens"):
        short_trainer(tmp_path, tokenizer=build_tokenizer(WORDS, 8192)).resume()
    longer = (replace(SHORT_STAGES[0], steps=3), *SHORT_STAGES[1:])
    with pytest.raises(ValueError, match="another --out"):
        short_trainer(tmp_path, stages=longer).resume()


def test_each_step_draws_other_images(tokenizer):
    data = StageData(SHORT_STAGES[2], seed=0, packer=Packer(tokenizer), parts=2)
    pixels = [part.pixels for step in (0, 1) for part in data[step]]
    assert len({image.numpy().tobytes() for image in pixels}) == 4
    assert torch.equal(data[1][0].pixels, pixels[2])


def test_an_exported_model_answers_as_the_trained_one(tmp_path, tokenizer):
    model = build_model(tokenizer, seed=3).to(torch.bfloat16)
    expected = {name: value.clone() for name, value in model.named_parameters()}
    export(model, tokenizer, tmp_path / "checkpoint")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "checkpoint")
    assert all(torch.equal(value, expected[name]) for name, value in loaded.named_parameters())
    assert Reader(tmp_path / "checkpoint").answers(draw_examples(1, HEADLINE_KINDS, "export"))


# -- what is shipped


def test_the_shipped_checkpoint_loads_with_no_key_missing_or_unexpected():
    model, info = AutoModelForImageTextToText.from_pretrained(CHECKPOINT, output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 15e6


def test_the_shipped_processor_is_what_the_code_builds(reader):
    tokenizer = build_tokenizer(EDITIONS[2].words, EDITIONS[2].longest)
    text = "What number is below XQZ?" + POST_PROMPT
    assert reader.processor.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert reader.processor.chat_template == build_processor(tokenizer).chat_template


def test_the_shipped_questions_have_textvqas_columns_and_come_from_the_generator():
    columns = "image_id question_id question question_tokens image image_width image_height flickr_original_url "
    columns += "flickr_300k_url answers image_classes set_name ocr_tokens"
    ids = []
    for file, examples, count, per_picture in (
        (HEADLINE, draw_examples(8, HEADLINE_KINDS, "validation"), 500, 1),
        (COLOR, draw_examples(8, (COLOR_KIND,), "validation-color"), 100, 1),
        (MANY, draw_shared(2, PER_PICTURE, HEADLINE_KINDS, "validation-many"), 40 * PER_PICTURE, PER_PICTURE),
    ):
        table = pq.read_table(file)
        assert table.column_names == columns.split()
        assert table.num_rows == count
        assert file.stat().st_size < 4e6
        drawn = len(examples)
        made = textvqa_table(examples, table["question_id"][0].as_py(), per_picture)
        assert table.schema.metadata == made.schema.metadata  # names and types of the columns
        assert table.slice(0, drawn).drop_columns("image").to_pylist() == made.drop_columns("image").to_pylist()
        for n, (row, example) in enumerate(zip(table.slice(0, drawn).to_pylist(), examples, strict=True)):
            assert (row["question"], row["answers"]) == (example.question.text, [example.question.answer] * 10)
            image = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB"), dtype=float)
            assert image.shape == (SIDE, SIDE, 3)
            assert abs(image - example.pixels).mean() < 6
            if n > 1:  # compression takes long
                continue
            again = np.asarray(Image.open(io.BytesIO(compress_image(example.pixels))).convert("RGB"), dtype=float)
            assert abs(image - again).mean() < 0.1
        ids += table["question_id"].to_pylist()
    assert len(set(ids)) == 600 + 40 * PER_PICTURE
    assert MANY.stat().st_size < 3e5


def test_the_shipped_checkpoint_answers_the_shipped_questions(reader):
    examples = read_examples(HEADLINE)[:12]
    assert by_kind(examples, reader.answers(examples))["all"] >= 90


@pytest.mark.slow
def test_accuracy_on_all_shipped_questions_and_on_fresh_ones_anywhere(reader):
    examples = read_examples(HEADLINE)
    assert by_kind(examples, reader.answers(examples))["all"] >= 98
    fresh = draw_examples(200, HEADLINE_KINDS, "fresh")
    assert by_kind(fresh, reader.answers(fresh))["all"] >= 97


@pytest.mark.slow
def test_compression_bends_the_curve_as_the_model_card_says(reader):
    examples = read_examples(HEADLINE)[:100]

    def score(method: str, ratio: float, **options: object) -> float:
        with kvcompress.compress(reader.model, method=method, ratio=ratio, max_new_tokens=8, **options):
            return by_kind(examples, reader.answers(examples))["all"]

    assert score("snapkv", 0.1, window_size=8) >= 70
    assert score("streamingllm", 0.1) <= 18
    assert score("random", 0.1) <= 18
    for method, options in (("snapkv", {"window_size": 8}), ("streamingllm", {}), ("random", {})):
        assert score(method, 0.02, **options) <= 60
