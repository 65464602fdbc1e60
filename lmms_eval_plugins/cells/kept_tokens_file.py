"""Read and write which tokens of a prompt were kept, as entries from `model/kept_tokens.py` for some of the questions.

results/<task>/<model>/<cell>/survivors.jsonl
results/<task>/<model>/images/<hash>.jpg       each image once, shared by the cells
"""

import base64
import hashlib
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from kvcompress.errors import one_line
from kvcompress.files import replacing, write_text

from .errors import DamagedFile
from .results import dumps

SURVIVORS_FILE = "survivors.jsonl"
IMAGES_FOLDER = "images"
KINDS = ("vision", "text")  # of tokens


def unpacked(packed: dict[str, Any]) -> np.ndarray:
    """Unpack an entry's `vision` or `text` into a bool array (layers, heads, tokens). Raises ValueError if it is not of
    the shape that it says."""
    bits = np.frombuffer(zlib.decompress(base64.b64decode(packed["bits"])), dtype=np.uint8)
    count = math.prod(packed["shape"])
    if len(bits) != math.ceil(count / 8):  # numpy would make up the rest, however large
        raise ValueError(f"{len(bits)} bytes are not {count} bits")
    return np.unpackbits(bits, count=count, bitorder="little").astype(bool).reshape(packed["shape"])


def kept_mask(entry: dict[str, Any], kind: str = "all") -> np.ndarray:
    """Return which of an entry's tokens were kept, bool (layers, heads, tokens), vision tokens first; `kind`: `vision`,
    `text` or `all`."""
    return np.concatenate([unpacked(entry[name]) for name in (KINDS if kind == "all" else (kind,))], axis=2)


def shares(entry: dict[str, Any], kind: str) -> np.ndarray | None:
    """Return the share of an entry's tokens that were kept, (layers, heads); `kind`: as for `kept_mask`. None if the
    prompt has no such tokens."""
    mask = kept_mask(entry, kind)
    return mask.mean(2) if mask.shape[2] else None


def needs(entry: dict[str, Any]) -> np.ndarray | None:
    """Return how much the answer needs each token of an entry's prompt, (layers, heads, tokens), vision tokens first:
    shares that sum to 1 per head. None unless the entry's method looks ahead at the answer."""
    if "needs" not in entry:
        return None
    worth = np.concatenate([_levels(entry["needs"][kind]) ** 2 for kind in KINDS], axis=2)
    return worth / np.maximum(worth.sum(2, keepdims=True), np.finfo(np.float64).tiny)


def needs_kept(entry: dict[str, Any], worth: np.ndarray) -> np.ndarray:
    """Return the share of what the answer needs (`needs` of the same prompt) that an entry kept, (layers, heads)."""
    return (worth * kept_mask(entry)).sum(2)


def _levels(packed: dict[str, Any]) -> np.ndarray:
    levels = np.frombuffer(zlib.decompress(base64.b64decode(packed["levels"])), dtype=np.uint8)
    return levels.reshape(packed["shape"]).astype(np.float64)


def write_kept_tokens(folder: Path, images: Path, asked: int, entries: list[dict[str, Any]]) -> None:
    """Write a cell's entries into its `folder`, and their images, each once, into the folder `images`.

    The first line holds the number of questions requested; entries refer to an image by its file. If none were
    requested, nothing is written.
    """
    if not asked:
        return
    lines = [dumps({"asked": asked})]
    for entry in entries:
        stored, files = without_images(entry)
        for name, content in files.items():
            if not (images / name).exists():  # the name is a hash of the content
                with replacing(images / name) as draft:
                    draft.write_bytes(content)
        lines.append(dumps(stored))
    write_text(folder / SURVIVORS_FILE, "".join(line + "\n" for line in lines))


def without_images(entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return an entry that refers to its images by files, and the content of each file."""
    stored, files = [], {}
    for image in entry["images"]:
        rest = {key: value for key, value in image.items() if key != "jpeg"}
        if "jpeg" in image:
            content = base64.b64decode(image["jpeg"])
            rest["file"] = hashlib.sha256(content).hexdigest()[:16] + ".jpg"
            files[rest["file"]] = content
        stored.append(rest)
    return {**entry, "images": stored}, files


def read_kept_tokens(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a cell; empty if it has no overlays. Raises DamagedFile."""
    return _read(folder)[1]


def overlays_asked(folder: Path) -> int:
    """Return for how many questions of each task the cell in `folder` records the kept tokens. Raises DamagedFile."""
    return _read(folder)[0]


def kept_tokens_damage(folder: Path) -> str | None:
    """Say what is wrong with a cell's entries; None if they are valid or absent."""
    try:
        _read(folder)
    except DamagedFile as error:
        return str(error)
    return None


def _read(folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of questions requested, and the entries."""
    path = folder / SURVIVORS_FILE
    if not path.is_file():
        return 0, []
    from .contents import Entry, Header, fault  # takes a tenth of a second

    try:
        with open(path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        if not lines:
            raise ValueError("it is empty")
        for number, line in enumerate(lines, 1):
            if wrong := fault(line, Header if number == 1 else Entry):
                raise ValueError(f"line {number}: {wrong}")
        asked, entries = lines[0]["asked"], lines[1:]
        for number, entry in enumerate(entries, 2):
            kept, shape = shares(entry, "all"), (len(entries[0]["layers"]), entries[0]["kv_heads"])
            if kept is None or kept.shape != shape:
                raise ValueError(f"line {number}: it is not of {shape[0]} layers with {shape[1]} KV heads")
            if (worth := needs(entry)) is not None:
                needs_kept(entry, worth)
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError, zlib.error) as error:
        raise DamagedFile(f"{SURVIVORS_FILE} is damaged: {one_line(error)}") from None
    return asked, entries
