"""The documentation: its code runs, its links resolve, its tables are what the code says, its lines are short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvcompress
from kvcompress.tokens import TokenMethod
from tests import methods_page
from tests.support.docs import DOCS, ROOT, python_blocks
from tests.support.families import FAMILIES

README = ROOT / "README.md"
INDEX = DOCS / "README.md"
PAGES = [README, *(ROOT / name / "README.md" for name in ("benchmarks", "examples")), *sorted(DOCS.rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture
def example(registry):
    """A model and inputs for it."""
    model = FAMILIES["qwen2"].build()
    inputs = FAMILIES["qwen2"].inputs(model, [200]) | {"max_new_tokens": 2}
    return {"kvcompress": kvcompress, "model": model, "inputs": inputs}


def test_the_example_method_is_registered_and_keeps_the_largest_values(example, capsys):
    definition, use, *_ = python_blocks(DOCS / "adding-a-method.md")
    assert len(definition.strip().splitlines()) <= 21
    exec(definition, example)
    assert kvcompress.list_methods()["value-norm"].options == {"window_size": 8}
    exec(use, example)
    session = example["session"]
    assert session.cache.realised_ratios()[0] == [0.2]
    kept = session.cache.kept_indices(0)[0][0]
    assert len(kept) == 40 + 1
    assert torch.equal(kept[-17:], torch.arange(184, 201))
    assert "tensor(" in capsys.readouterr().out


def test_the_example_with_attention_keeps_sinks_and_a_window(example):
    definition, _, with_attention, *_ = python_blocks(DOCS / "adding-a-method.md")
    exec(definition, example)
    exec(with_attention, example)
    with kvcompress.compress(example["model"], "value-attention", 0.3) as session:
        example["model"].generate(**example["inputs"])
    for kept in session.cache.kept_indices(0)[0]:
        assert len(kept) == 60 + 1
        assert torch.equal(kept[:4], torch.arange(4))
        assert torch.equal(kept[-33:], torch.arange(168, 201))


def test_a_context_is_saved_and_asked_as_the_page_says(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids = example["inputs"]["input_ids"]
    context, question = ({"input_ids": part, "attention_mask": torch.ones_like(part)} for part in (ids[:, :190], ids))
    example |= {"context": context, "question": question | {"max_new_tokens": 2}}
    exec(next(block for block in python_blocks(DOCS / "python.md") if "cache.save" in block), example)
    assert (tmp_path / "video.safetensors").is_file()
    assert example["cache"].seen_tokens == 190
    assert example["output"].shape[1] == 200 + 2


def test_the_readme_shows_the_method_of_the_page():
    definition, *_ = python_blocks(DOCS / "adding-a-method.md")
    shown = python_blocks(README)[2].strip()
    assert definition.strip().endswith(shown)


@pytest.mark.slow
def test_the_readmes_python_runs_in_an_empty_file(tmp_path):
    """The bundled model reads 97 from a picture: once alone, and twice where several questions are asked about it."""
    file = tmp_path / "copied.py"
    file.write_text("\n".join(python_blocks(README)[:2]), encoding="utf-8")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert [line for line in answers if line.strip().isdigit()] == ["97", "97", "97"]


def test_the_pages_of_methods_are_what_their_command_writes():
    assert methods_page.PAGE.read_text(encoding="utf-8") == methods_page.render(), "run python -m tests.methods_page"
    methods = methods_page.own_methods()
    assert {page.stem for page in methods_page.FOLDER.iterdir()} == methods.keys()
    for name, info in methods.items():
        written = (methods_page.FOLDER / f"{name}.md").read_text(encoding="utf-8")
        assert written.startswith(methods_page.made(name, info)), f"{name}: run python -m tests.methods_page"


def test_each_share_of_what_the_authors_code_keeps_stands_on_one_methods_page():
    fidelity = (ROOT / "benchmarks/results/fidelity.md").read_text(encoding="utf-8").partition("## Variants")[0]
    shares = re.findall(r"^\| .* \| \[", fidelity, re.MULTILINE)
    pages = "".join(page.read_text(encoding="utf-8") for page in methods_page.FOLDER.iterdir())
    shown = [line for part in pages.split("## Agreement")[1:] for line in part.split("<!--")[0].splitlines()]
    assert len([line for line in shown if re.match(r"\| .* \| \[", line)]) == len(shares) > 100


def test_what_checks_a_method_is_said_of_methods_that_exist():
    assert set(methods_page.CHECKED_BY) == set(methods_page.own_methods())


def test_the_readme_counts_the_methods_that_there_are():
    text = " ".join(README.read_text(encoding="utf-8").split())
    drops = [issubclass(info.cls, TokenMethod) for name, info in kvcompress.list_methods().items() if name != "full"]
    known = [*methods_page.CHECKED_BY.values()].count(methods_page.AUTHORS)
    assert f"has {drops.count(False)} KV methods and {drops.count(True)} that drop vision tokens" in text
    assert f"for {known} [the authors' own code]" in text
    assert f"| methods | {len(drops)} |" in text


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").split()) <= 1200


@each_page
def test_no_line_is_above_120_characters_but_the_address_of_a_reference(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [number for number, line in enumerate(lines, 1) if len(line) > 120 and not re.match(r"\[[^]]+\]: ", line)]
    assert not long, f"lines {long}"


@each_page
def test_every_link_leads_to_a_file_and_a_heading(page):
    for link in links(page):
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not fragment or fragment in anchors(target), link


@each_page
def test_every_reference_is_defined(page):
    text = prose(page)
    used = set(re.findall(r"\]\[([^]]+)\]", text)) | set(re.findall(r"\[(\d{4}\.\d{5})\](?![(:\[])", text))
    assert used <= set(re.findall(r"^\[([^]]+)\]: ", text, flags=re.MULTILINE))


def test_every_page_is_reachable_from_the_index():
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in links(INDEX)}
    assert linked >= {page for page in DOCS.glob("*.md") if page != INDEX}


def prose(page: Path) -> str:
    """The page without its code."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def links(page: Path) -> list[str]:
    """What the page links to inside the repository."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^]]+\]: (\S+)", text, flags=re.MULTILINE)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
