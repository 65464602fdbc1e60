"""Generated long tasks: what is drawn answers the questions, a seed gives the same bytes, lmms-eval runs them."""

import io
import re
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pyarrow.parquet as pq
import pytest
from lmms_eval.protocol import ChatMessages
from PIL import Image

from kvcompress.errors import KVCompressError
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells.data import find_tasks, load_tasks
from lmms_eval_plugins.long_pack import documents, drawing, needles, words
from lmms_eval_plugins.long_pack.__main__ import main, pack_of
from lmms_eval_plugins.long_pack.dataset import KINDS, table_of
from lmms_eval_plugins.long_pack.documents import Document
from lmms_eval_plugins.long_pack.drawing import COLORS, Canvas, TooSmall
from lmms_eval_plugins.long_pack.needles import Haystack
from lmms_eval_plugins.long_pack.prompts import Look, place_of
from lmms_eval_plugins.model.prompts import read_messages
from lmms_eval_plugins.tasks import long_pack as scoring

SMALL = Look(picture_size=(140, 120), page_size=(300, 330), font_px=9, words=12)
FLAGS = ["--picture-size", "140x120", "--page-size", "300x330", "--font-px", "9", "--words", "12"]
DEPTHS = (0.0, 0.5, 1.0)


def haystacks(length=7):
    return [Haystack(f"{seed}/{depth}", length, depth, SMALL) for seed in range(4) for depth in DEPTHS]


@pytest.fixture(scope="module")
def reports():
    return [Document(f"{length}", length, depth, SMALL) for length, depth in ((2, 0.0), (2, 1.0), (9, 0.5), (5, 0.25))]


def opened(image):
    return Image.open(io.BytesIO(image))


def cards(prompt):
    """Place -> lines, of every picture with a card."""
    return {place: lines for place, lines in enumerate(prompt.written, 1) if lines}


def test_sentences_have_at_least_the_words_asked_for_and_none_too_many():
    for wanted in (1, 12, 40):
        drawn = words.sentences(Random(wanted), wanted)
        counts = [len(sentence.split()) for sentence in drawn]
        assert sum(counts[:-1]) < wanted <= sum(counts)


# -- needles


def test_a_sentence_of_the_text_and_no_other_tells_the_code():
    for haystack in haystacks():
        prompt = haystack.prompt("retrieval_text")
        site = re.search("access code of the (.+)[?]", prompt.question.text)[1]
        said = [
            (n, f"The access code of the {site} is {prompt.question.answer}." in t)
            for n, t in enumerate(prompt.texts, 1)
        ]
        assert [n for n, is_there in said if is_there] == list(prompt.question.places)
        assert "".join(prompt.texts).count(f"of the {site} is") == 1
        assert len(re.findall("The access code of the", "".join(prompt.texts))) == 3  # two distractors
        assert not cards(prompt)


def test_the_card_with_the_name_and_no_other_has_the_number():
    for haystack in haystacks():
        prompt = haystack.prompt("retrieval_image")
        name = re.search("says (.+)[?]", prompt.question.text)[1]
        assert {place: lines[1] for place, lines in cards(prompt).items() if lines[0] == name} == {
            prompt.question.places[0]: prompt.question.answer
        }
        assert len(cards(prompt)) == 3
        assert len({lines for lines in cards(prompt).values()}) == 3


def test_only_the_picture_at_the_depth_shows_the_shape_in_its_colour():
    for haystack in haystacks():
        prompt = haystack.prompt("which_image")
        color, shape = re.search(r"shows a (\w+) (\w+)[?]", prompt.question.text).groups()
        assert [n for n, shapes in enumerate(haystack.shapes, 1) if (color, shape) in shapes] == list(
            prompt.question.places
        )
        assert prompt.question.answer == str(prompt.question.places[0])
        pixels = np.asarray(opened(prompt.images[prompt.question.places[0] - 1]))
        assert (pixels == COLORS[color]).all(axis=-1).sum() > 100


def test_as_many_cards_say_the_name_as_are_counted():
    answers = Counter()
    for haystack in haystacks():
        prompt = haystack.prompt("counting")
        name = re.search("card say (.+)[?]", prompt.question.text)[1]
        found = [place for place, lines in cards(prompt).items() if lines == (name,)]
        assert found == list(prompt.question.places)
        assert prompt.question.answer == str(len(found))
        assert prompt.question.depth is None
        answers[len(found)] += 1
    assert len(answers) >= 4


def test_the_sentence_leads_to_the_person_and_the_persons_card_to_the_number():
    for haystack in haystacks():
        prompt = haystack.prompt("reasoning")
        site = re.search("looks after the (.+)[?]", prompt.question.text)[1]
        ((place, person),) = [
            (n, found[1])
            for n, text in enumerate(prompt.texts, 1)
            for found in re.finditer(rf"{site} is looked after by (\w+)", text)
        ]
        ((card, number),) = [(n, lines[1]) for n, lines in cards(prompt).items() if lines[0] == person.upper()]
        assert prompt.question.answer == number
        assert place == haystack.place + 1 != card
        assert prompt.question.places == tuple(sorted((place, card)))


def test_needles_lie_at_the_depth_that_is_asked_for():
    for haystack in haystacks(length=9):
        assert haystack.place == {0.0: 0, 0.5: 4, 1.0: 8}[haystack.depth]
        for kind in ("retrieval_text", "retrieval_image", "which_image"):
            question = haystack.prompt(kind).question
            assert (question.depth, question.places) == (haystack.depth, (haystack.place + 1,))
    assert [place_of(0.25, length) for length in (2, 3, 4, 5, 64)] == [0, 1, 1, 1, 16]


def test_a_card_is_legible_ink_on_white_somewhere_in_the_picture():
    haystack = haystacks()[0]
    prompt = haystack.prompt("retrieval_image")
    place = prompt.question.places[0] - 1
    before, after = np.asarray(haystack.pictures[place].image), np.asarray(opened(prompt.images[place]))
    rows, columns = np.nonzero((before != after).any(axis=-1))
    card = after[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    assert (
        card.shape[:2] <= tuple(side + 1 for side in drawing.card_size(["WWWWWWWWW", "0000000"], SMALL.font_px))[::-1]
    )
    assert 0.5 < (card == drawing.PAPER).all(axis=-1).mean() < 0.95
    assert (card.max(axis=-1) < 90).sum() > 40


# -- documents


def read_page(lines):
    """What a page says, from its lines of text alone: heading, running text, table, chart, foot."""
    start = lines.index("Name")
    header = lines[start : start + 1 + len(documents.COLUMNS)]
    table, rest = {}, lines[start + len(header) :]
    for _ in range(documents.ROWS):
        row, rest = rest[: len(header)], rest[len(header) :]
        table[row[0]] = dict(zip(header[1:], map(int, row[1:]), strict=True))
    bars, (foot,) = rest[:-1], rest[-1:]
    chart = {name: int(value) for value, name in zip(bars[::2], bars[1::2], strict=True)}
    return {"heading": lines[0], "text": " ".join(lines[1:start]), "table": table, "chart": chart, "foot": foot}


def answer_to(question, pages):
    """The answer of a question, from what stands on the pages, and the pages that give it."""
    numbered = dict(enumerate(pages, 1))
    if found := re.fullmatch(r"What does the table on page (\d+) say for (\w+) in (\w+)\?", question):
        page, row, column = int(found[1]), found[2], found[3]
        return str(numbered[page]["table"][row][column]), [page]
    if found := re.fullmatch(r"What is the heading on page (\d+)\?", question):
        return numbered[int(found[1])]["heading"], [int(found[1])]
    if found := re.fullmatch(r"Which name has the highest bar in the chart on page (\d+)\?", question):
        chart = numbered[int(found[1])]["chart"]
        return max(chart, key=chart.get), [int(found[1])]
    if found := re.fullmatch(r"Who led the work on the (.+)\?", question):
        led = [
            (n, re.search(rf"Work on the {found[1]} was led by (\w+ \w+)\.", page["text"]))
            for n, page in numbered.items()
        ]
        led = [(n, match[1]) for n, match in led if match]
        assert len(led) < 2
        return (led[0][1], [led[0][0]]) if led else ("Not answerable", [])
    if found := re.fullmatch(r"Which page has the heading (.+)\? Answer like this: page N\.", question):
        (number,) = [n for n, page in numbered.items() if page["heading"] == found[1]]
        return f"page {number}", [number]
    value = r"the value for (\w+) in (\w+) from the table on page (\d+)"
    found = re.fullmatch(rf"Add {value} and {value}\. What is the sum\?", question)
    row, column, page, other_row, same, other = found.groups()
    assert column == same
    total = numbered[int(page)]["table"][row][column] + numbered[int(other)]["table"][other_row][column]
    return str(total), sorted([int(page), int(other)])


@pytest.mark.parametrize("kind", documents.KINDS)
def test_what_stands_on_the_pages_answers_the_question(kind, reports):
    for report in reports:
        prompt = report.prompt(kind)
        pages = [read_page(list(lines)) for lines in prompt.written]
        assert answer_to(prompt.question.text, pages) == (prompt.question.answer, list(prompt.question.places))
        if len(prompt.question.places) == 1:
            assert prompt.question.places == (report.place + 1,)


def test_an_answer_stands_on_one_page_only_and_every_page_says_its_number(reports):
    for report in reports:
        everything = [" ".join(lines) for lines in report.written]
        for kind in ("table_value", "section_title", "text_fact"):
            question = report.prompt(kind).question
            assert [n for n, text in enumerate(everything, 1) if question.answer in text] == list(question.places)
        numbers = re.findall(r"\b\d{5}\b", " ".join(everything))
        assert len(numbers) == len(set(numbers)) == len(report.pages) * (documents.ROWS * 3 + documents.BARS)
        assert report.prompt("sum_two_pages").question.answer not in numbers
        assert not any(report.missing in text for text in everything)
        feet = [read_page(list(lines))["foot"] for lines in report.written]
        assert feet == [f"Page {n} of {len(feet)}" for n in range(1, len(feet) + 1)]


def test_what_does_not_fit_is_an_error_and_never_cut_off():
    canvas = Canvas(Image.new("RGB", (60, 30)))
    canvas.write((2, 2), "abc", 10)
    for place, text in (((2, 2), "a long line of text"), ((2, 25), "abc"), ((-3, 2), "abc")):
        with pytest.raises(TooSmall):
            canvas.write(place, text, 10)
    assert canvas.texts == ["abc"]
    with pytest.raises(KVCompressError, match=r"--page-size 200x330 is too small .* --font-px 9"):
        documents.check_page(Look(page_size=(200, 330), font_px=9), 12)
    documents.check_page(SMALL, 500)


def test_a_pages_text_fills_it_and_is_set_in_paragraphs():
    report = Document("a", 2, 0.0, Look(page_size=(600, 900), font_px=12))
    page = np.asarray(opened(report.images[0]).convert("L"))
    inked = np.nonzero((page < 128).any(axis=1))[0]
    assert np.diff(inked).max() < 60  # no large empty part
    lines = [line for line in report.written[0] if len(line.split()) > 3]
    assert len(lines) > 15
    assert max(drawing.width_of(line, 12) for line in lines) <= 600 - 2 * 12


# -- both


@pytest.mark.parametrize("kind", KINDS)
def test_no_question_holds_its_answer_and_right_answers_score_and_wrong_ones_do_not(kind, reports):
    makers = haystacks()[:6] if kind in needles.KINDS else reports
    results = scoring.needle_results if kind in needles.KINDS else scoring.document_results
    for made in makers:
        question = made.prompt(kind).question
        if question.answer_format in ("Str", "None"):
            assert question.answer.lower() not in question.text.lower()
        doc = {"kind": kind, "answer": question.answer, "answer_format": question.answer_format}
        right = f"[{question.answer}]" if question.answer_format == "List" else question.answer
        metric = "mmlongbench_acc" if kind in needles.KINDS else "mmlongbench_doc_acc"
        assert results(doc, [right]) == {metric: 1.0, kind: 1.0}
        for wrong in ("", "no idea", "[99]", "1234567", "Zzz Zzz"):
            assert results(doc, [wrong]) == {metric: 0.0, kind: 0.0}, wrong


def test_names_that_are_asked_for_stand_in_no_filler_sentence():
    filler = {
        word.lower().strip(".")
        for part in (words.OPENINGS, words.ADJECTIVES, words.NOUNS, words.DOINGS, words.WHERES)
        for phrase in part
        for word in phrase.split()
    }
    asked = [words.NAMES, words.SITES, words.FIRST_NAMES, words.LAST_NAMES, words.TITLES_FIRST, words.TITLES_SECOND]
    everything = [word.lower() for part in asked for word in part]
    assert len(everything) == len(set(everything))
    assert not filler & set(everything)
    assert not any(character.isdigit() for word in filler for character in word)


def write(folder, *argv):
    assert main(["--out", str(folder), "--lengths", "2,3", "--questions", "2", *FLAGS, *argv]) == 0
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.*"))}


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    first, again, other = (write(tmp_path / str(n), "--seed", seed) for n, seed in enumerate("778"))
    assert sorted(first) == [
        f"long_{t}/{f}" for t in ("document", "needle") for f in (f"long_{t}.yaml", "questions.parquet")
    ]
    assert first == again
    assert all(first[name] != other[name] for name in first)
    rows = pq.read_table(io.BytesIO(first["long_needle/questions.parquet"])).to_pylist()
    assert Counter((row["kind"], row["length"]) for row in rows) == {(k, n): 2 for k in needles.KINDS for n in (2, 3)}
    assert [len(row["image_list"]) for row in rows] == [row["length"] for row in rows]
    assert {opened(image["bytes"]).size for row in rows for image in row["image_list"]} == {(140, 120)}
    assert {row["depth"] for row in rows} == {0.0, 0.25, None}
    rows = pq.read_table(io.BytesIO(first["long_document/questions.parquet"])).to_pylist()
    assert {opened(image["bytes"]).size for row in rows for image in row["image_list"]} == {(300, 330)}
    assert len({(row["question"], row["answer"]) for row in rows}) == len(rows)
    for name in ("long_needle/long_needle.yaml", "long_document/long_document.yaml"):
        assert str(tmp_path) not in first[name].decode()


def test_an_image_that_several_questions_show_is_stored_once(tmp_path):
    flags = ["--name", "x", "--lengths", "3"]
    one, all_kinds = (
        write(tmp_path / name, *flags, "--kinds", kinds)
        for name, kinds in (("a", "table_value"), ("b", ",".join(documents.KINDS)))
    )
    assert list(one) == ["x_document/questions.parquet", "x_document/x_document.yaml"]
    sizes = [len(files["x_document/questions.parquet"]) for files in (one, all_kinds)]
    assert sizes[1] < 1.2 * sizes[0]


def test_long_documents_are_no_limit_for_needles_alone():
    pack, _ = pack_of(["--out", "x", "--lengths", "700", "--kinds", "counting"])
    assert pack.tasks() == {"needle": ("counting",)}


def test_texts_and_pictures_of_a_needle_come_in_turn():
    prompt = haystacks()[0].prompt("retrieval_text")
    (row,) = table_of([prompt], 0).to_pylist()
    doc = {**row, "image_list": [opened(image["bytes"]) for image in row["image_list"]]}
    kwargs = {"pre_prompt": "pre ", "post_prompt": " post"}
    messages = ChatMessages(messages=scoring.doc_to_messages(doc, kwargs))
    (message,) = read_messages(messages, 1).conversation
    parts = message["content"]
    assert [part["type"] for part in parts] == ["text", "image"] * 7 + ["text"]
    assert [part["text"] for part in parts[::2]] == [*prompt.texts, f"pre {prompt.question.text} post"]
    assert all(text.endswith(f"\n\nPicture {n}:\n") for n, text in enumerate(prompt.texts, 1))
    assert scoring.doc_to_text(doc, kwargs) == "".join(part["text"] for part in parts[::2])


@pytest.mark.usefixtures("one_tiny_model", "plots_not_drawn")
def test_the_command_evaluates_a_generated_folder(tmp_path, monkeypatch, small_index):
    write(tmp_path / "pack", "--questions", "1", "--lengths", "2", "--kinds", "retrieval_image,counting,table_value")
    monkeypatch.chdir(tmp_path)
    path = ["--include_path", "pack", "--output_path", "out"]
    assert evaluate.main(["long_needle,long_document", "tiny", "streamingllm", "0.5", *path]) == 0
    for task, metrics in (
        ("long_needle", {"mmlongbench_acc", "retrieval_image", "counting"}),
        ("long_document", {"mmlongbench_doc_acc", "table_value"}),
    ):
        assert (Path("out") / task / "tiny" / "streamingllm-0.5" / "samples.jsonl").is_file()
        (loaded,) = load_tasks(find_tasks([task], Path("pack").resolve()), task, None)
        assert set(loaded.aggregation()) == metrics
    assert "If the answer is not in the document" in loaded.doc_to_text(loaded.eval_docs[0])
