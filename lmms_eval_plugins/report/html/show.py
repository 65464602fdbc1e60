"""Draw which patches of an image and which words of a question are kept."""

import argparse
import base64
import io
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from lmms_eval.api.instance import Instance
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from tqdm import tqdm

from kvcompress import KVCompressError
from kvcompress.command_line import check_environment
from kvcompress.files import check_output, replacing
from kvcompress.pictures import read_image

from ...cells.kept_tokens_file import shares, unpacked, without_images
from ...cells.machine import VARIABLES, set_offline
from ...cells.names import check_names
from ...cells.plan import Plan
from ...cells.results import Cell
from ...cells.run import load_model
from ...evaluate import parse
from ...model.input_methods import INPUT_METHODS
from ...model.lm import KVCompressLM
from ..groups import Group, question_frame
from ..plots import wrapped
from ..table import sweep_frame
from .data import data_url, page_group, with_loyalty
from .page import write_page

TASK, DOC_ID = "show", 0
PANELS = 8  # layers in a picture, evenly spread in a deeper model
DARKEST = 0.84
ROW = 2.1  # inches
LONGEST = 40  # characters of an answer beside its row


def show(given: argparse.Namespace) -> None:
    """Write the picture. Raises UsageError, KVCompressError or EvaluationFailed for wrong arguments, image or model."""
    check_environment(VARIABLES)
    if given.out.suffix not in (".html", ".png"):
        raise KVCompressError(f"--out {str(given.out)!r}: the name must end in .html or .png")
    for name in ("method", "ratio"):
        if not getattr(given, name).strip(", "):
            raise KVCompressError(f"--{name} {getattr(given, name)!r} is an empty list")
    image = photo(given.image)
    check_output(given.out.parent, given.out.name)
    # The task is never run; this one needs no network.
    request = parse(["tiny_textvqa", given.model, f"full,{given.method}", given.ratio, *given.options])
    check_names(request)
    set_offline(request)
    plan = Plan.of(request)
    plan.check_machine(1)
    for cell, _ in plan.cells:
        if cell.method in INPUT_METHODS:
            raise KVCompressError(f"method {cell.method!r} changes the input and evicts nothing: nothing to show")
    lm = load_model(plan.arguments)
    lm.progress_bar = lambda total: tqdm(total=total, disable=True)
    answers = [answer(lm, image, given.question, cell, options) for cell, options in plan.cells]
    (write_html if given.out.suffix == ".html" else write_png)(given.out, given.question, answers)
    for one in answers:
        kept = " and ".join(f"{shares(one['entry'], kind).mean():.1%} of the {name}" for kind, name in one["kinds"])
        print(f"{one['name']}: {one['answer']!r}, keeps {kept}")
    print(f"written: {given.out}")


def photo(path: Path) -> Image.Image:
    """Read an image file as RGB. Raises KVCompressError."""
    try:
        return read_image(path)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise KVCompressError(f"{str(path)!r} is not an image that can be read: {error}") from None


def answer(lm: KVCompressLM, image: Image.Image, question: str, cell: Cell, options: dict[str, Any]) -> dict[str, Any]:
    """Return the answer under one cell, and in `entry` the tokens that were kept (see `model.kept_tokens`)."""
    content = [{"type": "image", "url": image}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    lm.task_dict[TASK] = {"test": [{}]}
    arguments = (question, lambda doc: messages, {}, DOC_ID, TASK, "test")
    metadata = {"task": TASK, "doc_id": DOC_ID, "repeats": 1}
    lm.set_cell(cell.method, cell.ratio, cell.budget, **options)
    lm.overlays = 1
    lm.reset_rows()
    request = Instance(request_type="generate_until", arguments=arguments, idx=0, metadata=metadata)
    (result,) = lm.generate_until([request])
    entry = {"task": TASK, "doc_id": DOC_ID, **lm.rows[0]["survivors"]}
    changed = "".join(f" {name}={value}" for name, value in sorted(cell.options.items()))
    is_full = cell.method == "full"
    return {
        "cell": cell,
        "name": "full" if is_full else f"{cell.method}{changed} {cell.size}",
        "answer": result.text.strip(),
        "measured": lm.rows[0],
        "kinds": [(kind, name) for kind, name in KINDS if shares(entry, kind) is not None],
        "entry": entry,
    }


KINDS = (("vision", "image tokens"), ("text", "text tokens"))


def write_html(path: Path, question: str, answers: list[dict[str, Any]]) -> None:
    """Write the report's page with this one question."""
    images: dict[str, str] = {}
    entries = []
    for one in answers:
        entry, files = without_images(one["entry"])
        images |= {name: data_url(content) for name, content in files.items()}
        entries.append([entry])
    cells = [as_results(question, one) for one in answers]
    frame = sweep_frame(cells).sort_index()  # in the order of the command line
    frame = with_loyalty(frame.assign(questions=list(map(question_frame, cells))))
    shown = page_group(Group(cells, frame), entries)
    model = Path(answers[0]["cell"].model).name
    shown |= {"title": f"{model}, one question", "made": ""}
    write_page(path, "What survives in the KV cache", {"groups": [shown], "images": images})


def as_results(question: str, one: dict[str, Any]) -> dict[str, Any]:
    """Return an answer as `groups.read_cells` returns the cell of a task with one question."""
    measured = one["measured"]
    sample = {"task": TASK, "doc_id": DOC_ID, "input": question, "filtered_resps": [one["answer"]]}
    realised = measured["realised_ratio"]
    return {
        "protocol": {**asdict(one["cell"]), "changed_options": one["cell"].options},
        "results": {},
        "efficiency": {"realised_ratio": {"mean": float(np.mean(realised)), "per_layer": realised}},
        "n_samples": 1,
        "samples": [{**sample, "measurement": measured}],
    }


def write_png(path: Path, question: str, answers: list[dict[str, Any]]) -> None:
    """Draw a row of pictures per cell: the mean over all layers, then single layers; evicted patches are dark."""
    entry = answers[0]["entry"]
    shown = np.unique(np.linspace(0, len(entry["layers"]) - 1, min(PANELS, len(entry["layers"]))).round().astype(int))
    rows, columns = len(answers), len(shown) + 1
    title = wrapped(question.splitlines()[0] if question else "", 1.9 * columns, 11)
    height = ROW * rows + 0.5 + 0.17 * title.count("\n")
    figure = Figure(figsize=(1.9 * columns, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for line, one in zip(axes, answers, strict=True):
        kept = unpacked(one["entry"]["vision"]).mean(1)  # (layers, tokens): the share of the heads
        for place, panel in enumerate(line):
            share = kept.mean(0) if place == 0 else kept[shown[place - 1]]
            draw(panel, one["entry"]["images"], share)
            panel.set_title(
                "all layers" if place == 0 else f"layer {entry['layers'][shown[place - 1]]}",
                fontsize=8,
                color="#5b6570",
            )
        answer = one["answer"] if len(one["answer"]) <= LONGEST else one["answer"][: LONGEST - 1] + "…"
        line[0].set_ylabel("\n".join(wrapped(text, ROW - 0.3, 9) for text in (one["name"], repr(answer))), fontsize=9)
    figure.suptitle(title, fontsize=11)
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150, format="png")


def draw(panel: Axes, images: list[dict[str, Any]], share: np.ndarray) -> None:
    """Draw the first image with its evicted patches dark, or a strip if the layout is unknown. `share` (vision
    tokens,): the share of heads that kept each token."""
    panel.set_xticks([])
    panel.set_yticks([])
    if not images or not len(share):
        return
    layout = images[0]["layout"]
    of_image = share[layout["start"] :]
    if not layout["views"]:
        panel.imshow(of_image[None, : layout["tokens"] or None], aspect="auto", cmap="Blues", vmin=0, vmax=1)
        panel.set_xlabel(layout["note"], fontsize=6, wrap=True)
        return
    size = images[0]["size"]
    picture = Image.open(io.BytesIO(base64.b64decode(images[0]["jpeg"])))
    panel.imshow(picture, extent=(0, 1, 1, 0), aspect="auto")
    finest = max(view["rows"] * view["columns"] for view in layout["views"])
    views = [view for view in layout["views"] if view["rows"] * view["columns"] == finest]
    # Of overlapping views of the same resolution, an overview comes before the detail; tiles lie side by side.
    for view in views[-1:] if overlap(views) else views:
        tokens = view["start"] + view["stride"] * np.arange(view["rows"])[:, None] + np.arange(view["columns"])
        dark = np.zeros((view["rows"], view["columns"], 4))
        dark[..., 3] = DARKEST * (1 - np.sqrt(of_image[tokens]))
        left, top, right, bottom = view["box"]
        panel.imshow(dark, extent=(left, right, bottom, top), aspect="auto", interpolation="nearest")
    panel.set_xlim(0, 1)
    panel.set_ylim(1, 0)
    panel.set_box_aspect(size[1] / size[0])


def overlap(views: list[dict[str, Any]]) -> bool:
    """Return whether all views show the same part of the image."""
    return all(math.dist(view["box"], views[0]["box"]) < 0.1 for view in views)
