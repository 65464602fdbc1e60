"""Generate documents of many pages, each with a heading, a text, a table and a chart, and questions in the style of
MMLongBench-Doc (arXiv 2407.01523): about one page, about two, and unanswerable ones.

Every number, heading and person occurs only once in a document.
"""

from dataclasses import dataclass
from random import Random

from PIL import Image

from lmms_eval_plugins.cells.errors import UsageError
from lmms_eval_plugins.long_pack.drawing import INK, LINE, PAPER, RULE, Canvas, TooSmall, width_of, wrapped
from lmms_eval_plugins.long_pack.prompts import Look, Prompt, Question, place_of
from lmms_eval_plugins.long_pack.words import (
    FIRST_NAMES,
    LAST_NAMES,
    NAMES,
    SITES,
    TITLES_FIRST,
    TITLES_SECOND,
    pairs,
    sentence,
)

KINDS = ("table_value", "section_title", "chart_highest", "text_fact", "which_page", "sum_two_pages", "unanswerable")
NUMBERS = range(10_000, 100_000)  # five digits: at least two tokens with any tokenizer
COLUMNS = ("Spring", "Summer", "Autumn")
ROWS, BARS = 4, 4
PARAGRAPH = 6  # sentences
LARGEST_BAR, SECOND_BAR = range(80_000, 100_000), range(10_000, 70_000)  # the highest is easy to see
BAR_COLORS = ((60, 100, 170), (200, 120, 50), (90, 150, 90), (150, 90, 150))
MOST_PAGES = min(len(FIRST_NAMES) * len(LAST_NAMES), len(NAMES) * len(SITES) - 1)  # one site is `missing`
NOT_ANSWERABLE = "Not answerable"  # in the words of lmms-eval's task


@dataclass(frozen=True)
class Page:
    """The content of a page.

    Attributes:
        number: counted from 1.
        site, person: the names in the sentence "Work on the SITE was led by PERSON."
        table: row name -> column -> value.
        chart: bar name -> value; one is far above the others.
    """

    number: int
    title: str
    site: str
    person: str
    table: dict[str, dict[str, int]]
    chart: dict[str, int]

    @property
    def fact(self) -> str:
        return f"Work on the {self.site} was led by {self.person}."


class Document:
    """A document: its pages, and prompts with questions about them.

    Attributes:
        place: index of the page at the depth.
        missing: a site that no page mentions.
    """

    def __init__(self, seed: str, length: int, depth: float, look: Look):
        rng = Random(seed)
        self.seed, self.length, self.depth, self.look = seed, length, depth, look
        self.place = place_of(depth, length)
        titles = pairs(rng, TITLES_FIRST, TITLES_SECOND, length)
        people = pairs(rng, FIRST_NAMES, LAST_NAMES, length)
        *sites, missing = pairs(rng, NAMES, SITES, length + 1)
        self.missing = " ".join(missing)
        highest = rng.sample(LARGEST_BAR, length)
        others = rng.sample(SECOND_BAR, length * (ROWS * len(COLUMNS) + BARS - 1))
        self.pages = []
        for index in range(length):
            names = rng.sample(NAMES, ROWS + BARS)
            table = {name: {column: others.pop() for column in COLUMNS} for name in names[:ROWS]}
            values = [highest[index], *(others.pop() for _ in range(BARS - 1))]
            rng.shuffle(values)
            chart = dict(zip(names[ROWS:], values, strict=True))
            named = (" ".join(each[index]) for each in (titles, sites, people))
            self.pages.append(Page(index + 1, *named, table, chart))
        canvases = [draw_page(rng, page, length, look) for page in self.pages]
        self.images = [canvas.webp() for canvas in canvases]
        self.written = [tuple(canvas.texts) for canvas in canvases]

    def prompt(self, kind: str) -> Prompt:
        """Return a prompt with all pages and a question of this kind about the page at the depth."""
        rng = Random(f"{self.seed}/{kind}")
        page, on_page = self.pages[self.place], f"on page {self.place + 1}"
        row, column = rng.choice(list(page.table)), rng.choice(COLUMNS)
        places, depth, answer_format = [page.number], self.depth, "Str"
        if kind == "table_value":
            text, answer = f"What does the table {on_page} say for {row} in {column}?", str(page.table[row][column])
            answer_format = "Int"
        elif kind == "section_title":
            text, answer = f"What is the heading {on_page}?", page.title
        elif kind == "chart_highest":
            text, answer = (
                f"Which name has the highest bar in the chart {on_page}?",
                max(page.chart, key=page.chart.get),
            )
        elif kind == "text_fact":
            text, answer = f"Who led the work on the {page.site}?", page.person
        elif kind == "which_page":
            text, answer = f"Which page has the heading {page.title}? Answer like this: page N.", f"page {page.number}"
            answer_format = "Int"
        elif kind == "sum_two_pages":
            other = rng.choice([each for each in self.pages if each is not page])
            other_row = rng.choice(list(other.table))
            text = (
                f"Add the value for {row} in {column} from the table {on_page} and the value for {other_row} in "
                f"{column} from the table on page {other.number}. What is the sum?"
            )
            answer, answer_format = str(page.table[row][column] + other.table[other_row][column]), "Int"
            places = sorted([page.number, other.number])
        else:  # unanswerable
            text, answer, answer_format = f"Who led the work on the {self.missing}?", NOT_ANSWERABLE, "None"
            places, depth = [], None
        question = Question(kind, text, answer, answer_format, self.length, depth, tuple(places))
        return Prompt(question, self.images, self.written)


def check_page(look: Look, pages: int) -> None:
    """Raise UsageError if pages are too small for their longest possible content."""
    words = (TITLES_FIRST, TITLES_SECOND, NAMES, SITES, FIRST_NAMES, LAST_NAMES)
    longest = [max(each, key=lambda word: width_of(word, look.font_px)) for each in words]
    title, site, person = (" ".join(longest[place : place + 2]) for place in (0, 2, 4))
    widest = sorted(NAMES, key=lambda word: -width_of(word, look.font_px))[: ROWS + BARS]
    value = NUMBERS.stop - 1
    table = {name: dict.fromkeys(COLUMNS, value) for name in widest[:ROWS]}
    chart = dict.fromkeys([*widest[:1], *widest[ROWS + 1 :]], value)
    draw_page(Random(0), Page(pages, title, site, person, table, chart), pages, look)


def draw_page(rng: Random, page: Page, pages: int, look: Look) -> Canvas:
    """Draw a page. Filler sentences take the space that heading, fact, table and chart leave.

    Raises UsageError if the page is too small for these.
    """
    (width, height), px = look.page_size, look.font_px
    title_px, line = round(1.5 * px), round(LINE * px)
    foot = height - 2 * px
    table_top = foot - _table_height(px) - _chart_height(px) - px
    text_top = px + round(LINE * title_px)
    canvas = Canvas(Image.new("RGB", look.page_size, PAPER))
    try:
        canvas.write((px, px), page.title, title_px)
        for number, text in enumerate(_filled(rng, page.fact, (table_top - text_top - px) // line, look)):
            canvas.write((px, text_top + number * line), text, px)
        _draw_table(canvas, page, table_top, look)
        _draw_chart(canvas, page, table_top + _table_height(px), look)
        text = f"Page {page.number} of {pages}"
        canvas.write(((width - width_of(text, px)) // 2, foot), text, px)
    except TooSmall:
        raise UsageError(f"--page-size {width}x{height} is too small for a page's content at --font-px {px}") from None
    return canvas


def _filled(rng: Random, fact: str, lines: int, look: Look) -> list[str]:
    """Return at most `lines` lines of paragraphs that contain the fact. Raises TooSmall if it does not fit."""
    text, fitting = [fact], None
    while len(found := _lines(text, look)) <= lines:
        fitting = found
        text.insert(rng.randint(0, len(text)), sentence(rng))
    if fitting is None:
        raise TooSmall(f"{fact!r} does not fit into {lines} lines")
    return fitting


def _lines(text: list[str], look: Look) -> list[str]:
    """Set sentences as paragraphs and return their lines."""
    width = look.page_size[0] - 2 * look.font_px
    paragraphs = [text[first : first + PARAGRAPH] for first in range(0, len(text), PARAGRAPH)]
    return [line for paragraph in paragraphs for line in wrapped(" ".join(paragraph), look.font_px, width)]


def _table_height(px: int) -> int:
    return round(1.6 * px) * (ROWS + 1) + px


def _chart_height(px: int) -> int:
    return 9 * px


def _draw_table(canvas: Canvas, page: Page, top: int, look: Look) -> None:
    px, left, right = look.font_px, look.font_px, look.page_size[0] - look.font_px
    row_height, column_width = round(1.6 * px), (right - left) // (len(COLUMNS) + 1)
    lines = [["Name", *COLUMNS], *([name, *map(str, row.values())] for name, row in page.table.items())]
    for number, line in enumerate(lines):
        y = top + number * row_height
        canvas.draw.line((left, y, right, y), RULE)
        for place, text in enumerate(line):
            if width_of(text, px) > column_width - px // 2:
                raise TooSmall(f"{text!r} does not fit into a column of {column_width} pixels")
            canvas.write((left + px // 4 + place * column_width, y + px // 4), text, px)
    bottom = top + len(lines) * row_height
    canvas.draw.line((left, bottom, right, bottom), RULE)
    for place in range(len(COLUMNS) + 2):
        x = left + place * column_width
        canvas.draw.line((x, top, x, bottom), RULE)


def _draw_chart(canvas: Canvas, page: Page, top: int, look: Look) -> None:
    """Draw bars with their names below and their values above."""
    px, left, right = look.font_px, look.font_px, look.page_size[0] - look.font_px
    base, highest = top + _chart_height(px) - 2 * px, _chart_height(px) - 4 * px
    slot = (right - left) // BARS
    for place, (name, value) in enumerate(page.chart.items()):
        if max(width_of(name, px), width_of(str(value), px)) > slot - px // 4:
            raise TooSmall(f"{name!r} does not fit below a bar")
        x, bar = left + place * slot, round(highest * value / LARGEST_BAR.stop)
        canvas.draw.rectangle((x + slot // 4, base - bar, x + 3 * slot // 4, base), BAR_COLORS[place], INK)
        canvas.write((x + (slot - width_of(str(value), px)) // 2, base - bar - round(LINE * px)), str(value), px)
        canvas.write((x + (slot - width_of(name, px)) // 2, base + px // 4), name, px)
    canvas.draw.line((left, base, right, base), INK)
