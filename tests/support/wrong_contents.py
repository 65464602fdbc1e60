"""Wrong contents for the files that commands read: damage to any file, and wrong values inside.

Each function takes a random source and the correct content, and returns (a description, the wrong content)."""

import copy
import io
import json
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
import yaml

Wrong = Callable[[random.Random, bytes], tuple[str, bytes]]
DEPTH = 10_000  # levels of nesting
DEEP = "@deep@"  # in a tree: this many nested lists, which no encoder writes
VALUES = [
    None, True, False, -1, 0, 1, 1.5, 10**9, 2**70, 10**400, 1e308, float("nan"), float("inf"), "", " ", "wide",
    "../..",    "a" * 5000, "a\x00b", "\x1b[31m", "é\n\u2028", [], {}, [[]], [None], {"": None}, ["x", {}], DEEP,
]  # fmt: skip


def damaged(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """Damage a file of any kind: cut, overwritten, in another encoding, empty, of another kind."""
    place = rng.randrange(len(content) + 1)
    text = content.decode(errors="replace")
    return rng.choice(
        [
            ("empty", b""),
            ("blank", b" \n\n"),
            (f"cut at {place}", content[:place]),
            (f"begins at {place}", content[place:]),
            (f"NUL at {place}", content[:place] + b"\0" + content[place:]),
            (f"bytes at {place}", content[:place] + rng.randbytes(40) + content[place + 40 :]),
            ("UTF-16", text.encode("utf-16")),
            ("Latin-1", b"\xe9" + content),
            ("BOM", b"\xef\xbb\xbf" + content),
            ("Windows' line ends", content.replace(b"\n", b"\r\n")),
            ("twice", content + content),
            ("nested lists", b"[" * DEPTH),
            ("nested objects", b'{"a":' * DEPTH + b"1" + b"}" * DEPTH),
            ("nested blocks", b"{% if true %}" * DEPTH + b"{% endif %}" * DEPTH),
            ("binary", bytes(range(256)) * 4),
            ("noise", rng.randbytes(300)),
            ("a picture", b"\x89PNG\r\n\x1a\n" + b"\0" * 40),
            ("JSON text", b'"only words"'),
            ("JSON list", b"[]"),
            ("JSON object", b"{}"),
            ("JSON null", b"null"),
            ("a long number", b"9" * 5000),
        ]
    )


def wrong_tree(rng: random.Random, tree: Any) -> tuple[str, Any]:
    """Change one place in nested lists and dictionaries: a part missing, renamed, or with another value."""
    tree = copy.deepcopy(tree)
    holder, key, where, below = None, None, "", tree
    while isinstance(below, dict | list) and below and (holder is None or rng.random() < 0.7):  # often near the top
        holder, key = below, rng.choice(list(below) if isinstance(below, dict) else range(len(below)))
        where, below = f"{where}/{key}", holder[key]
    if holder is None:
        return "another value", rng.choice(VALUES)
    change = rng.choice(["less", "renamed", "value", "value", "value"])
    if change == "less":
        del holder[key]
    elif change == "renamed" and isinstance(holder, dict):
        holder[rng.choice(["", "x", 7, f"{key} "])] = holder.pop(key)
    else:
        holder[key] = rng.choice(VALUES)
        change = f"{holder[key]!r:.30}"
    return f"{where}: {change}", tree


def wrong_json(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    what, tree = wrong_tree(rng, json.loads(content))
    return what, _json(tree)


def _json(tree: Any) -> bytes:
    text = json.dumps(tree, default=str)
    return text.replace(f'"{DEEP}"', "[" * DEPTH + "]" * DEPTH).encode()


def wrong_lines(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """Change one line of a file with JSON on every line."""
    lines = content.splitlines()
    number = rng.randrange(len(lines))
    if rng.random() < 0.2:
        return f"line {number} is gone", b"\n".join(lines[:number] + lines[number + 1 :])
    what, lines[number] = wrong_json(rng, lines[number]) if rng.random() < 0.8 else damaged(rng, lines[number])
    return f"line {number}: {what}", b"\n".join(lines) + b"\n"


def wrong_yaml(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    text = content.decode()
    kind = rng.choice(["line", "twice", "value", "value", "value"])
    lines = text.splitlines(keepends=True)
    number = rng.randrange(len(lines))
    if kind == "line":
        lines[number] = rng.choice(
            [
                "\t" + lines[number], "- " + lines[number], "", "? [a\n", "*nobody\n", "a: !!python/name:os.system\n",
                "%x\n",
            ]
        )  # fmt: skip
        return f"line {number}: {lines[number]!r:.40}", "".join(lines).encode()
    if kind == "twice":
        return f"line {number} twice", "".join([*lines[: number + 1], *lines[number:]]).encode()
    if "!function" in text:  # only lmms-eval reads these
        name, _, _ = lines[number].partition(":")
        value = rng.choice(VALUES)
        return f"{name}: {value!r:.30}", "".join(
            [*lines[:number], f"{name}: {value!r}\n", *lines[number + 1 :]]
        ).encode()
    what, tree = wrong_tree(rng, yaml.safe_load(text))
    return what, yaml.safe_dump(tree).replace(f"'{DEEP}'", "[" * DEPTH + "]" * DEPTH).encode()


TEMPLATES = {
    "division by zero": "{{ 1 // 0 }}",
    "include": "{% include 'other.jinja' %}",
    "import": "{% import 'other.jinja' as other %}",
    "extends": "{% extends 'other.jinja' %}",
    "huge range": "{% for i in range(10 ** 9) %}{{ i }}{% endfor %}",
    "huge number": "{{ 10 ** 5000 }}",
    "undefined": "{{ messages[0].nothing.more }}",
    "unknown filter": "{{ messages | nothing }}",
    "unknown function": "{{ nothing(messages) }}",
    "no picture": "{% for message in messages %}{{ message['role'] }}{% endfor %}",
    "text of parts": "{% for message in messages %}{{ message['content'] + 'x' }}{% endfor %}",
    "twice the picture": "{% for message in messages %}<image>{{ message['role'] }}<image>{% endfor %}",
    "nothing": "{# nothing #}",
    "recursion": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "refuses": "{{ raise_exception('no\nsystem message') }}",
    "forbidden": "{{ ''.__class__.__mro__ }}",
    "not closed": "{% for message in messages %}",
    "unknown tag": "{% nothing %}",
    "long name": "{{ " + "a" * 5000 + ".b }}",
    "nested parentheses": "{{ " + "(" * DEPTH + ")" * DEPTH + " }}",
    "wrong index": "{{ messages[99]['role'] }}",
    "type": "{{ 'a' + 1 }}",
    "key": "{{ {}['a']['b'] }}",
    "date": "{{ strftime_now('%Q') }}{{ strftime_now(7) }}",
}  # fmt: skip


def wrong_template(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    what = rng.choice(list(TEMPLATES))
    before = rng.choice([b"", content])
    return f"{what}{' behind the right one' if before else ''}", before + TEMPLATES[what].encode()


def wrong_tensors(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """Change a safetensors file: a tensor, its header, or its metadata."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header.get("__metadata__") or {}
    kind = rng.choice(["tensor", "tensor", "header", "metadata", "metadata", "length"])
    if kind == "length":
        wrong = rng.choice([0, 1, length + 1, 2**20, 2**40, 2**63])
        return f"header of {wrong} bytes", wrong.to_bytes(8, "little") + content[8:]
    if kind == "metadata" and metadata:
        name = rng.choice(sorted(metadata))
        try:
            what, tree = wrong_tree(rng, json.loads(metadata[name]))
            metadata[name] = _json(tree).decode()
        except ValueError:
            what, metadata[name] = "text", "{"
        kind = f"metadata {name}: {what}"
    elif kind == "header":
        what, header = wrong_tree(rng, header)
        kind = f"header {what}"
    else:
        tensors = safetensors.torch.load(content)
        what, tensors = _wrong_tensor(rng, tensors)
        return what, safetensors.torch.save(tensors, metadata or None)
    text = _json(header)
    return kind, len(text).to_bytes(8, "little") + text + content[8 + length :]


def _wrong_tensor(rng: random.Random, tensors: dict[str, torch.Tensor]) -> tuple[str, dict[str, torch.Tensor]]:
    name = rng.choice(sorted(tensors))
    part = tensors.pop(name)
    made = {
        "gone": None,
        "of NaN": torch.full_like(part, float("nan")) if part.is_floating_point() else part,
        "of infinities": part / 0,
        "of int64": part.long(),
        "of bool": part.bool(),
        "of float16": part.half(),
        "of complex64": part.to(torch.complex64),
        "of one layer less": part[:-1],
        "of a dimension more": part[None],
        "turned": part.T if part.dim() == 2 else part.flatten(),
        "empty": part[:0],
        "one number": part.flatten()[:1].squeeze(),
    }
    what = rng.choice(list(made))
    if made[what] is not None:
        tensors[name] = made[what].contiguous()
    return f"{name} {what}", tensors


def wrong_pickle(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """Change a file of torch.save."""
    what, tree = wrong_tree(rng, torch.load(io.BytesIO(content), weights_only=True))
    made = io.BytesIO()
    torch.save(tree, made)
    return what, made.getvalue()


def wrong_parquet(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    table = pq.read_table(io.BytesIO(content))
    name = rng.choice(table.column_names)
    place = table.column_names.index(name)
    text = pa.array([f"{value!r:.20}" for value in table[name].to_pylist()])
    nothing = pa.nulls(len(table), table.schema.field(name).type)
    changes = {
        "gone": lambda: table.drop_columns([name]),
        "renamed": lambda: table.rename_columns([each + "_" * (each == name) for each in table.column_names]),
        "text": lambda: table.set_column(place, name, text),
        "numbers": lambda: table.set_column(place, name, pa.array(range(len(table)))),
        "without type": lambda: table.set_column(place, name, pa.nulls(len(table))),
        "null": lambda: table.set_column(place, table.schema.field(name), nothing),
        "of no rows": lambda: table[:0],
        "of one row": lambda: table[:1],
    }
    what = rng.choice(list(changes))
    made = io.BytesIO()
    pq.write_table(changes[what](), made)
    return f"{name} {what}", made.getvalue()


def wrong_table(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """Change a text table, with commas or tabs between the cells."""
    mark = "\t" if b"\t" in content else ","
    rows = [line.split(mark) for line in content.decode().splitlines()]
    row = rng.randrange(len(rows))
    column = rng.randrange(len(rows[row]))
    kind = rng.choice(["cell", "cell", "shorter", "longer", "gone"])
    if kind == "cell":
        rows[row][column] = str(rng.choice(VALUES[:24]))
        kind = f"{rows[row][column]!r:.30}"
    elif kind == "gone":
        del rows[row]
    else:
        rows[row] = rows[row][:-1] if kind == "shorter" else [*rows[row], "1"]
    return f"row {row}, column {column}: {kind}", "".join(mark.join(each) + "\n" for each in rows).encode()


PROGRAMS = {
    "syntax": "def (",
    "indentation": "  x = 1\n y = 2",
    "import": "import no_such_module",
    "division by zero": "1 / 0",
    "leaves": "raise SystemExit(7)",
    "empty error": "raise ValueError",
    "recursion": "def a(): a()\na()",
    "lines": "raise ValueError('a\\nb')",
    "nested": "(" * DEPTH,
    "no dataclass": "import kvcompress\n@kvcompress.register('x')\nclass X: pass",
}


def wrong_program(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    what = rng.choice(list(PROGRAMS))
    return what, content + b"\n" + PROGRAMS[what].encode()
