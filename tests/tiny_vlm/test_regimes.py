"""Long answers, several pictures, video, long texts: what is drawn, how it is packed and trained on, the tasks."""

import re
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from lmms_eval_plugins.cells.data import find_tasks
from lmms_eval_plugins.tasks import regimes as scoring
from lmms_eval_plugins.tiny_vlm.accuracy import Reader
from lmms_eval_plugins.tiny_vlm.dataset import COLOR, HEADLINE
from lmms_eval_plugins.tiny_vlm.questions import POST_PROMPT
from lmms_eval_plugins.tiny_vlm.regimes import file_of, read_prompts
from tiny_vlm import packing, signs
from tiny_vlm.editions import DRAWN, EDITIONS, MixtureData
from tiny_vlm.modeling import build_model, build_processor, build_tokenizer, insert_layer
from tiny_vlm.pack import in_turn, pack
from tiny_vlm.packing import Packer, packed_forward
from tiny_vlm.regimes import KINDS, REGIMES, WORDS, needle, read_all
from tiny_vlm.regimes.dataset import draw_prompts, table_of
from tiny_vlm.regimes.words import ORDINALS

SMALL = {  # what keeps a forward pass short
    "read_all": {"signs": (2, 3), "tokens": (5, 40)},
    "multi_image": {"pictures": (2, 2)},
    "video": {"frames": (8, 8)},
    "needle": {"tokens": (90, 140), "picture_share": 1.0},
}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(WORDS, 8192)


def read_signs(labels):
    """Colour -> (leftmost patch, lines), off the labels of a picture's or a frame's patches."""
    found = {}
    glyph, color = labels[0], labels[1]
    for number, name in enumerate(signs.COLORS, start=1):
        rows, columns = np.nonzero(color == number)
        if len(rows):
            lines = [glyph[row][(color[row] == number)] for row in sorted(set(rows))]
            found[name] = (columns.min(), ["".join(signs.CHARACTERS[code - 1] for code in line) for line in lines])
    return found


def number_of(lines):
    return next((line for line in lines if line[0] in signs.DIGITS), None)


def word_of(lines):
    return next((line for line in lines if line[0] in signs.LETTERS), None)


# -- what is drawn


@pytest.mark.parametrize("regime", REGIMES)
def test_the_same_seed_draws_the_same_prompt_and_another_seed_another(regime):
    first, again, other = (REGIMES[regime](Random(seed)) for seed in ("1", "1", "2"))
    assert (first.text, first.questions) == (again.text, again.questions)
    assert all(np.array_equal(a, b) for a, b in zip(first.pictures, again.pictures, strict=True))
    assert (first.frames is None) == (again.frames is None)
    assert first.frames is None or np.array_equal(first.frames, again.frames)
    assert first.questions != other.questions or regime == "read_all"
    assert first.questions[0].answer != other.questions[0].answer


@pytest.mark.parametrize("regime", REGIMES)
def test_no_question_has_two_answers_and_no_word_of_a_prompt_stands_on_a_sign(regime):
    for seed in range(5):
        shown = REGIMES[regime](Random(seed))
        asked = [question.text for question in shown.questions]
        assert len(set(asked)) == len(asked)
        assert not {question.answer for question in shown.questions} & set(WORDS)


def test_every_sign_is_read_from_left_to_right(tokenizer):
    lengths = []
    for seed in range(40):
        shown = read_all.draw(Random(seed))
        found = read_signs(shown.picture_labels[0])
        ordered = sorted(found, key=lambda color: found[color][0])
        assert len({left for left, _ in found.values()}) == len(found), "two signs begin in one column"
        assert shown.question.answer == ", ".join(" ".join((color, *found[color][1])) for color in ordered)
        lengths.append(1 + len(tokenizer(shown.question.answer)["input_ids"]))
    assert min(lengths) >= 24
    assert 60 < max(lengths) <= 96


def test_questions_about_several_pictures_are_answered_by_the_picture_they_name():
    for seed in range(20):
        shown = REGIMES["multi_image"](Random(seed))
        assert 2 <= len(shown.pictures) <= 6
        pictures = [read_signs(labels) for labels in shown.picture_labels]
        for question in shown.questions:
            if question.kind == "t2p":
                color, text = re.search(r"the (\w+) sign with (\w+)\?", question.text).groups()
                (place,) = [n for n, found in enumerate(pictures) if text in found.get(color, (0, []))[1]]
                assert question.answer == f"the {ORDINALS[place]} picture"
            else:
                color, ordinal = re.search(r"the (\w+) sign of the (\w+) picture", question.text).groups()
                lines = pictures[ORDINALS.index(ordinal)][color][1]
                assert question.answer == {"p2n": number_of, "p2w": word_of}[question.kind](lines)


def test_signs_of_a_clip_come_and_go_in_the_order_that_is_asked_for():
    lengths = set()
    for seed in range(40):
        shown = REGIMES["video"](Random(seed))
        lengths.add(len(shown.frames))
        sequence = []
        for labels, before in zip(shown.frame_labels, shown.before, strict=True):
            found = read_signs(labels)
            assert len(found) <= 1
            for color, (_, lines) in found.items():
                if not sequence or sequence[-1][0] != color:
                    sequence.append((color, lines))
                earlier = [0, *(1 + list(signs.COLORS).index(name) for name, _ in sequence)][len(sequence) - 1]
                assert before == earlier
        numbers = [number_of(lines) for _, lines in sequence]
        for question in shown.questions:
            if question.kind in ("next", "previous"):
                (key,) = re.findall(r"\d+", question.text)
                step = 1 if question.kind == "next" else -1
                assert question.answer == numbers[numbers.index(key) + step]
            else:
                (lines,) = [lines for color, lines in sequence if f"the {color} sign" in question.text]
                assert question.answer == {"v2n": number_of, "v2w": word_of}[question.kind](lines)
    assert (min(lengths), max(lengths)) >= (8, 30)
    assert max(lengths) <= 32


def test_facts_answer_the_questions_about_a_text_of_the_length_that_is_asked_for(tokenizer):
    for seed, tokens in enumerate((120, 1024, 4096)):
        shown = needle.draw(Random(seed), (tokens, tokens), picture_share=0.0)
        assert tokens - 25 < len(tokenizer(shown.text)["input_ids"]) <= tokens
        facts = re.findall(r"fact (\d+): the number of (\w+) is (\d+)\.\n", shown.text)
        assert "".join("fact {}: the number of {} is {}.\n".format(*fact) for fact in facts) == shown.text
        answers = {
            **{f"what is the number of {word}?": number for _, word, number in facts},
            **{f"what word has the number {number}?": word for _, word, number in facts},
            **{f"what number is in fact {fact}?": number for fact, _, number in facts},
        }
        assert {question.text: question.answer for question in shown.questions} == answers


def test_characters_of_a_text_are_labelled_as_if_a_fact_were_a_sign(tokenizer):
    """The character to the left, and above a number its word."""
    shown = [needle.draw(Random(f"labels/{row}"), tokens=(60 + 30 * row,) * 2, picture_share=1.0) for row in range(2)]
    packer = Packer(tokenizer)
    batch = pack(packer, shown, False, text_labels=True)
    for row, one in enumerate(shown):
        left, above = [], []
        for number, word, value in re.findall(r"fact (\d+): the number of (\w+) is (\d+)", one.text):
            for run in (number, word, value):
                left += ["", *run[:-1]]
            above += ["" for _ in number + word] + [*word[: len(value)], *[""] * (len(value) - len(word))]
        for labels, expected in zip(batch.text_labels[:, row], (left, above), strict=True):
            asked = labels[labels != packing.IGNORED].tolist()
            assert [signs.CHARACTERS[label - 1] if label else "" for label in asked] == expected
    assert batch.text_labels.shape == (2, *batch.ids.shape)
    assert pack(packer, shown, False).text_labels is None


@pytest.mark.parametrize("name", ["via", "holder"])
@pytest.mark.parametrize("regime", ["video", "multi_image"])
def test_what_has_to_be_found_first_stands_where_the_answer_begins(regime, name, tokenizer):
    shown, packer = REGIMES[regime](Random("via"), **SMALL[regime]), Packer(tokenizer)
    batch = pack(packer, [shown], False, via=name)
    places = (batch.via[0] != packing.IGNORED).nonzero().flatten().tolist()
    asked = [question for question in shown.questions if question.via]
    assert asked
    assert [tokenizer.decode(batch.via[0, place]).strip() for place in places] == [getattr(one, name) for one in asked]
    for place, question in zip(places, asked, strict=True):
        assert tokenizer.decode(batch.ids[0, :place]).endswith(f"{question.text}<|im_end|><|im_start|>assistant")
        first = packer.encode(question.answer)[0]
        assert batch.targets[0, place] == first
    by_color = {question.text: question.answer for question in shown.questions}
    for question in asked:
        if question.kind in ("next", "previous"):
            assert by_color[f"what number was on the {question.holder} sign?"] == question.answer
        if question.kind == "next":
            assert f"followed {by_color[f'what number was on the {question.via} sign?']}?" in question.text


def test_a_text_with_a_picture_asks_about_both():
    shown = needle.draw(Random(0), (200, 200), picture_share=1.0)
    found = read_signs(shown.picture_labels[0])
    asked = {question.kind: question for question in in_turn(Random(0), shown.questions, 16)}
    assert set(asked) <= {*needle.KINDS, *needle.BACKWARDS, "f2v", *needle.PICTURE_KINDS, *needle.PICTURE_TEXTS}
    assert set(asked) & set(needle.PICTURE_KINDS)
    (lines,) = [lines for color, (_, lines) in found.items() if f"the {color} sign" in asked["i_c2n"].text]
    assert asked["i_c2n"].answer == number_of(lines)


# -- packed for training


@pytest.mark.parametrize(
    ("regime", "is_long"), [*((regime, False) for regime in REGIMES), ("video", True), ("needle", True)]
)
def test_packed_questions_of_a_regime_have_the_logits_of_separate_prompts(regime, is_long, tokenizer, monkeypatch):
    if is_long:
        monkeypatch.setattr(packing, "LONG_PREFIX", 0)
    packer = Packer(tokenizer)
    reader = object.__new__(Reader)
    reader.processor = build_processor(tokenizer)
    reader.model = build_model(tokenizer, seed=0).eval()
    prompts = [REGIMES[regime](Random(seed), **SMALL[regime]) for seed in (3, 4)]
    prompts = [replace(shown, questions=in_turn(Random(0), shown.questions, 3)) for shown in prompts]
    batch = pack(packer, prompts, post_prompt=regime != "read_all")
    reader.model.set_attn_implementation("packed")
    with torch.no_grad():
        _, _, hidden = packed_forward(reader.model, batch)
    reader.model.set_attn_implementation("sdpa")
    for row, shown in enumerate(prompts):
        number = len(shown.questions)
        inputs = reader.shown_inputs([replace(shown, questions=shown.questions[-1:])])
        answer = packer.encode(f"{shown.questions[-1].answer}<|im_end|>")
        inputs["input_ids"] = torch.cat((inputs["input_ids"], torch.tensor([answer])), 1)
        inputs.pop("attention_mask")
        here = (batch.segments[row] == 0) | (batch.segments[row] == number)
        assert inputs["input_ids"][0].tolist() == batch.ids[row, here].tolist()
        with torch.no_grad():
            expected = reader.model(**inputs).logits[0, -len(answer) :]
        answered = batch.segments[row] == number
        torch.testing.assert_close(
            reader.model.lm_head(hidden[-1][row, answered][-len(answer) :]), expected, atol=2e-5, rtol=0
        )


def test_the_kinds_of_questions_are_asked_in_turn():
    shown = needle.draw(Random(1), (1024, 1024), picture_share=1.0)
    kinds = [question.kind for question in in_turn(Random(0), shown.questions, 12)]
    assert {kinds.count(kind) for kind in needle.KINDS} <= {2, 3, 4}
    assert len(set(kinds) & set(needle.PICTURE_KINDS)) >= 2


@pytest.mark.parametrize("stage", EDITIONS[2].stages[-3:], ids=lambda stage: stage.name)
def test_batches_of_a_mixture_are_of_one_size_and_within_the_models_positions(stage, tokenizer):
    packer = Packer(tokenizer)
    first, again = (MixtureData(stage, 0, packer)[7] for _ in range(2))
    assert len(first) == len(stage.parts)
    for batch, same, part in zip(first, again, stage.parts, strict=True):
        assert torch.equal(batch.ids, same.ids)
        assert batch.ids.numel() <= part.tokens * 1.4 or len(batch.ids) == 1
        assert batch.positions.max() < EDITIONS[2].longest
        assert len(batch.pixels) % len(batch.ids) == 0
        assert all(batch.kinds), "each row is asked something"


# -- trained


def test_a_layer_that_is_inserted_changes_nothing_at_first(tokenizer):
    model = build_model(tokenizer, 0).eval()
    ids = torch.arange(30, 50)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        insert_layer(model, 3)
        assert torch.equal(model(input_ids=ids).logits, before)
    layers = model.model.language_model.layers
    assert [layer.self_attn.layer_idx for layer in layers] == [0, 1, 2, 3, 4]
    assert model.config.text_config.num_hidden_layers == 5


def test_the_second_edition_begins_as_the_first_and_knows_all_words():
    first, second = EDITIONS[1], EDITIONS[2]
    assert [stage.name for stage in second.stages[:4]] == [stage.name for stage in first.stages[:4]]
    assert set(first.words) < set(second.words)
    assert {part.regime for stage in second.stages[4:] for part in stage.parts} == set(DRAWN)
    full = {part.regime: part.ranges for part in second.stages[-1].parts}
    assert full["needle"]["tokens"][1] == needle.TOKENS[1]
    assert full["read_all"]["tokens"] == read_all.TOKENS


# -- the tasks


def test_the_bundled_files_come_from_the_generator_and_stay_small():
    for regime in REGIMES:
        table = pq.read_table(file_of(regime))
        assert table.num_rows == 500
        drawn = draw_prompts(regime, 3, "validation")
        made = table_of(regime, drawn)
        assert table.schema.metadata == made.schema.metadata
        media = ["image_list", "video"]
        assert table.slice(0, 3).drop_columns(media).to_pylist() == made.drop_columns(media).to_pylist()
        kinds = KINDS[regime]
        assert table["task"].to_pylist() == [kinds[n % len(kinds)] for n in range(500)]
    assert sum(file.stat().st_size for file in [*map(file_of, REGIMES), HEADLINE, COLOR]) < 12e6


@pytest.mark.slow
def test_a_bundled_text_with_its_picture_and_question_has_no_more_tokens_than_4096(tokenizer):
    prompts = read_prompts(file_of("needle"))
    for shown, ids in zip(prompts, tokenizer([shown.text for shown in prompts])["input_ids"], strict=True):
        prompt = len(ids) + needle.PICTURE_TOKENS * len(shown.pictures) + needle.QUESTION_TOKENS
        assert needle.fits(shown)
        assert 1000 < prompt <= 4096
    assert not needle.fits(needle.draw(Random(0), (4090, 4090), picture_share=0.0))


@pytest.mark.parametrize("regime", ["multi_image", "video"])
def test_compression_leaves_pictures_and_clips_as_they_were_drawn(regime, tmp_path):
    drawn = draw_prompts(regime, 2, "validation")
    file = tmp_path / "some.parquet"
    pq.write_table(table_of(regime, drawn), file)
    for before, after in zip(drawn, read_prompts(file), strict=True):
        assert (before.text, before.questions) == (after.text, after.questions)
        shown = (before.pictures, after.pictures) if before.frames is None else (before.frames, after.frames)
        for a, b in zip(*shown, strict=True):
            assert a.shape == b.shape
            assert abs(a.astype(float) - b).mean() < 5


@pytest.fixture(scope="module")
def tasks():
    lmms_eval_tasks = pytest.importorskip("lmms_eval.tasks")
    names = [f"tiny_{regime}" for regime in REGIMES]
    return lmms_eval_tasks.get_task_dict(names, find_tasks(names), "chat")


def test_the_tasks_ask_what_training_asks(tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "CLIPS", tmp_path)
    for regime in REGIMES:
        task = tasks[f"tiny_{regime}"]
        doc = task.test_docs()[1]
        shown = draw_prompts(regime, 2, "validation")[1]
        post_prompt = "" if regime == "read_all" else POST_PROMPT
        assert task.doc_to_text(doc) == shown.text + shown.question.text.capitalize() + post_prompt
        visuals = scoring.doc_to_visual(doc)
        assert len(visuals) == len(shown.pictures) + (shown.frames is not None)
        if shown.frames is not None:
            assert Path(visuals[0]).read_bytes() == doc["video"]["bytes"]
            assert scoring.doc_to_visual(doc) == visuals
        assert task.process_results(doc, [doc["answer"].upper() + "."])["exact_match"] == 1
        assert task.process_results(doc, ["nonsense"])["exact_match"] == 0


def test_signs_that_are_read_count_in_their_order():
    doc = {"answer": "red ab 12, blue 345, cyan xy"}
    scores = [
        scoring.process_long_results(doc, [answer])["signs_read"]
        for answer in (
            "Red ab 12, blue 345, cyan xy",
            "red ab 12, blue 344, cyan xy",
            "blue 345, cyan xy",
            "cyan xy, blue 345",
            "red ab 12, blue 345, cyan xy, white 9, white 9, white 9",
            "",
        )
    ]
    assert scores == [1, 2 / 3, 2 / 3, 1 / 3, 1 / 2, 0]
