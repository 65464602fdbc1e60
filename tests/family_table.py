"""What is promised on which model family, as checks, and the table of it in docs/families.md.

`python -m tests.family_table` writes the table. tests/test_family_table.py runs every check, and compares the table
with the registry below: what is in it was checked, and what was checked is in it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import kvcompress
from kvcompress.cache.layer import CompressedLayer
from kvcompress.check.reference import Kept, generate, only_attending_to
from kvcompress.clusters.learned import LearnedKVCluster
from kvcompress.hooks.model import text_decoder
from tests.support.calibrations import calibration_of
from tests.support.families import FAMILIES, LISTED_FAMILIES, MORE_FAMILIES, Family

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
BEGIN, END = "<!-- made by `python -m tests.family_table` -->\n", "<!-- end -->\n"

METHODS = ("streamingllm", "snapkv", "adakv", "h2o")  # of position, of a window, ragged heads, of all queries
RATIO = 0.3
NEW = 3
TOLERANCE = 1e-4  # fp32, logits of order 1

Inputs = dict[str, torch.Tensor]
TEXTS: dict[str, Callable[[Family], Inputs]] = {
    "text": lambda family: family.inputs(family.build(), [30]),
    "text, batch of 3": lambda family: family.inputs(family.build(), [30, 9, 17]),
}
IMAGES: dict[str, Callable[[Family], Inputs]] = {
    "image": lambda family: family.inputs(family.build(), [40], [1]),
    "two images": lambda family: family.inputs(family.build(), [60], [2]),
    "images, batch of 3": lambda family: family.inputs(family.build(), [40, 20, 60], [1, 0, 2]),
}
VIDEOS: dict[str, Callable[[Family], Inputs]] = {"video": Family.video_inputs}
KINDS = TEXTS | IMAGES | VIDEOS

CHUNK = 7  # cuts images
CHUNKS = "prefill_chunk"
# What asks more of a model than attention over a cache, and the families whose layers do not all give that: sliding
# windows (Gemma 3 and 4), cross-attention (Llama 3.2 Vision), linear attention (MiniCPM-V, Qwen3.5).
EXTRAS: dict[str, dict[str, object]] = {
    "first_token=compressed": {"method": "snapkv", "first_token": "compressed"},
    "kvzip": {"method": "kvzip"},
    "fastv": {"method": "fastv"},
}
OTHERS = "other methods"
OTHER_METHODS = tuple(
    name
    for name, info in kvcompress.list_methods().items()
    if issubclass(info.cls, kvcompress.KVCluster)
    and info.cls.__module__.startswith("kvcompress.")
    and name not in ("full", *METHODS)
    and info.cls.second_pass != "context"  # `kvzip` in EXTRAS represents them
    and not issubclass(info.cls, LearnedKVCluster)  # needs a checkpoint of the family
)
HYBRID = ("gemma3", "gemma4", "gemma4-e2b", "mllama", "minicpm-v", "qwen3.5")
REFUSED = {(name, extra) for name in HYBRID for extra in EXTRAS} - {
    ("gemma3", "kvzip"),
    ("gemma4", "kvzip"),
    ("gemma4-e2b", "kvzip"),
}
BOTH_WAYS = "cannot cut a 4-D mask, which models build if an image's tokens attend to each other in both directions"
CHUNKS_REFUSED = {
    "gemma3": BOTH_WAYS,
    "gemma4": BOTH_WAYS,
    "gemma4-e2b": BOTH_WAYS,
    "molmo2": BOTH_WAYS,
    "mllama": "layers all have full attention or sliding windows: mllama has others (cross-attention)",
    "minicpm-v": "layers all have full attention or sliding windows: minicpmv4_6 has others (LinearAttentionLayer)",
    "qwen3.5": "layers all have full attention or sliding windows: qwen3_5 has others (LinearAttentionLayer)",
}
ALL_FAMILIES = FAMILIES | MORE_FAMILIES
ROWS = FAMILIES | LISTED_FAMILIES  # those that this transformers lacks too
TITLES = {
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "llama": "Llama",
    "mistral": "Mistral",
    "llava-1.5": "LLaVA-1.5",
    "llava-next": "LLaVA-NeXT (1.6)",
    "llava-next-video": "LLaVA-NeXT-Video",
    "llava-onevision": "LLaVA-OneVision",
    "llava-onevision-original": "LLaVA-OneVision (original LLaVA-NeXT layout)",
    "qwen2-vl": "Qwen2-VL",
    "qwen2.5-vl": "Qwen2.5-VL",
    "qwen3-vl": "Qwen3-VL",
    "qwen3-vl-moe": "Qwen3-VL-MoE",
    "internvl": "InternVL 2.5, 3 (HF layout)",
    "smolvlm": "SmolVLM",
    "idefics3": "Idefics3",
    "gemma3": "Gemma 3",
    "mllama": "Llama 3.2 Vision",
    "minicpm-v": "MiniCPM-V 4.6",
    "qwen3.5": "Qwen3.5",
    "glm4v": "GLM-4.1V",
    "pixtral": "Pixtral",
    "mistral3": "Mistral Small 3.1 (Mistral 3)",
    "gemma4": "Gemma 4",
    "gemma4-e2b": "Gemma 4 E2B, E4B",
    "molmo2": "Molmo 2 (not in transformers 5.14)",
    "qwen3-omni": "Qwen3-Omni (thinker)",
    "qwen2-audio": "Qwen2-Audio (recordings as images)",
}


def kinds_of(family: Family) -> list[str]:
    """The kinds of input that the family takes."""
    return [*TEXTS, *(IMAGES if family.is_vlm else []), *(VIDEOS if family.video else [])]


def extras_of(family: Family) -> list[str]:
    """What of EXTRAS there is to ask of the family: token methods drop tokens of images."""
    has_images = family.is_vlm and family.image_format != "audio"
    return [extra for extra in EXTRAS if extra != "fastv" or has_images]


def chunked_kinds_of(family: Family) -> list[str]:
    """The kinds of input that go in chunks: those that are batches, and video."""
    return [kind for kind in kinds_of(family) if kind.endswith("batch of 3") or kind == "video"]


def kept_of(cache: kvcompress.CompressedCache) -> Kept:
    """What each layer kept; None for one that keeps transformers' own cache."""
    return [
        cache.kept_indices(layer_idx) if isinstance(layer, CompressedLayer) else None
        for layer_idx, layer in enumerate(cache.layers)
    ]


def check(family: Family, kind: str, method: str) -> None:
    """A method on a family with one kind of input. Raises AssertionError unless

    - at ratio 1.0 tokens and logits are those of the plain model, bit for bit;
    - at RATIO each layer and row keeps exactly its budget, and says so;
    - the cache's bytes are those of the tensors that it holds, and fewer than the full cache's;
    - the answer's logits are those of the full cache under a mask that hides exactly what was dropped.
    """
    model, inputs = family.build(), KINDS[kind](family)
    plain_tokens, plain = generate(model, inputs, NEW)
    with kvcompress.compress(model, method, 1.0) as session:
        tokens, logits = generate(model, inputs, NEW)
    assert torch.equal(tokens, plain_tokens)
    assert torch.equal(logits, plain)
    full_bytes = session.cache.nbytes
    with kvcompress.compress(model, method, RATIO) as session:
        tokens, logits = generate(model, inputs, NEW)
    cache, kept = session.cache, kept_of(session.cache)
    check_budgets(cache, kept, inputs)
    assert cache.nbytes == held_bytes(cache) < full_bytes
    with only_attending_to(model, kept):
        _, expected = generate(model, inputs, NEW, forced=tokens)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    assert (logits - plain).abs().max() > 0.1, "nothing that matters was dropped: the check shows nothing"


def check_other(family: Family, method: str) -> None:
    """One of OTHER_METHODS on the batch of 3, with images where the family has them. Raises AssertionError unless

    - at ratio 1.0 the logits are those of the plain model, bit for bit;
    - at RATIO each row keeps exactly its budget, summed over the layers, and the logits are others.
    """
    model, inputs = family.build(), KINDS[f"{'images' if family.is_vlm else 'text'}, batch of 3"](family)
    given = calibration_of(method, model)
    _, plain = generate(model, inputs, 2)
    with kvcompress.compress(model, method, 1.0, **given):
        _, logits = generate(model, inputs, 2)
    assert torch.equal(logits, plain)
    with kvcompress.compress(model, method, RATIO, **given) as session:
        _, logits = generate(model, inputs, 2)
    assert logits.isfinite().all()
    assert (logits - plain).abs().max() > 0.1
    ratios = torch.tensor(session.cache.realised_ratios())  # (layers, rows)
    kept = ratios.sum(0) * inputs["attention_mask"].sum(1)
    torch.testing.assert_close(kept, len(ratios) * torch.tensor(shares_of(inputs)).float(), atol=1e-3, rtol=0)


def check_budgets(cache: kvcompress.CompressedCache, kept: Kept, inputs: Inputs) -> None:
    """Each row keeps its share of the prompt per layer and KV head, in the mean over heads where these differ, and the
    decoded tokens; `realised_ratios` is that share."""
    lengths, shares = inputs["attention_mask"].sum(1).tolist(), shares_of(inputs)
    compressed = [of_layer for of_layer in kept if of_layer is not None]
    assert len(compressed) == len(cache.compressed_layers) > 0
    for of_layer in compressed:
        for heads, share in zip(of_layer, shares, strict=True):
            assert sum(map(len, heads)) == len(heads) * (share + NEW - 1)  # the last token is returned, never fed
    for ratios in cache.realised_ratios():
        assert all(abs(r - n / length) < 1e-6 for r, n, length in zip(ratios, shares, lengths, strict=True))


def shares_of(inputs: Inputs) -> list[int]:
    """The budget of each row's prompt at RATIO, per layer and KV head."""
    return [max(1, math.floor(RATIO * length + 0.5)) for length in inputs["attention_mask"].sum(1).tolist()]


def held_bytes(cache: kvcompress.CompressedCache) -> int:
    """Bytes of the tensors for entries or states that hang on the cache's layers, found by looking."""
    storages = {}
    for layer in cache.layers:
        holder = layer.storage if isinstance(layer, CompressedLayer) else layer
        for tensor in _tensors(vars(holder)):
            if tensor.ndim > 1 or isinstance(layer, CompressedLayer):  # not a sliding layer's own counters
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def check_extra(family: Family, extra: str) -> None:
    """`extra` generates on the family, dropping something, or is refused in one clear line."""
    model = family.build()
    inputs = family.inputs(model, [40, 30], [1, 1] if family.is_vlm else None)
    session = kvcompress.compress(model, ratio=RATIO, **EXTRAS[extra])
    if (family.name, extra) in REFUSED:
        check_refusal(session, inputs, "needs a model whose layers all have full attention")
        return
    with session:
        _, logits = generate(model, inputs, NEW)
    assert logits.isfinite().all()
    # A token method's first layers see all tokens.
    assert min(ratio for ratios in session.cache.realised_ratios() for ratio in ratios) < 1


def check_chunks(family: Family, kind: str) -> None:
    """Prompts in chunks of CHUNK tokens are refused in one clear line, or

    - at ratio 1.0 tokens are those of the plain model, and logits to TOLERANCE;
    - at RATIO no layer holds more than the prompt's budget after any chunk, and in the end each holds exactly that.
    """
    model, inputs = family.build(), KINDS[kind](family)
    session = kvcompress.compress(model, "snapkv", 1.0, prefill_chunk=CHUNK)
    if family.name in CHUNKS_REFUSED:
        check_refusal(session, inputs, CHUNKS_REFUSED[family.name])
        return
    plain_tokens, plain = generate(model, inputs, NEW)
    with session:
        tokens, logits = generate(model, inputs, NEW)
    assert torch.equal(tokens, plain_tokens)
    torch.testing.assert_close(logits, plain, atol=TOLERANCE, rtol=0)
    with kvcompress.compress(model, "snapkv", RATIO, prefill_chunk=CHUNK) as session, entries_held(session) as held:
        generate(model, inputs, NEW)
    chunks = math.ceil(inputs["input_ids"].shape[1] / CHUNK)
    assert len(held) == chunks + NEW - 1
    assert max(held[:chunks]) == max(shares_of(inputs))
    check_budgets(session.cache, kept_of(session.cache), inputs)


def check_refusal(session: kvcompress.Session, inputs: Inputs, promised: str) -> None:
    """Generating in the session is a KVCompressError, one line with `promised` in it."""
    message = ""
    try:
        with session:
            generate(session.model, inputs, NEW)
    except kvcompress.KVCompressError as error:
        message = str(error)
    assert promised in message, f"not refused as promised: {message!r}"
    assert "\n" not in message


@contextmanager
def entries_held(session: kvcompress.Session) -> Iterator[list[int]]:
    """The most entries that any layer holds per row and KV head, after each pass of the text decoder inside."""
    held = []
    handle = text_decoder(session.model).register_forward_hook(
        lambda *_: held.append(max(layer.memory.stored for layer in session.cache.compressed_layers))
    )
    try:
        yield held
    finally:
        handle.remove()


def cells() -> dict[tuple[str, str], str]:
    """(family, column) -> the cell: what its checks, which all pass, say."""
    found = {}
    for name, family in ROWS.items():
        for kind in KINDS:
            found[name, kind] = f"all {len(METHODS)}" if kind in kinds_of(family) else ""
        found[name, OTHERS] = f"all {len(OTHER_METHODS)}"
        for extra in EXTRAS:
            answer = "refused" if (name, extra) in REFUSED else "yes"
            found[name, extra] = answer if extra in extras_of(family) else ""
        found[name, CHUNKS] = "refused" if name in CHUNKS_REFUSED else "yes"
    return found


def render() -> str:
    """Both tables, in Markdown: kinds of input, then options."""
    options = [*EXTRAS, CHUNKS]
    titles = {option: f"`{option}`" for option in options}
    parts = [
        wrapped(f"Methods of the first columns: {', '.join(f'`{method}`' for method in METHODS)}."),
        wrapped(f"Other methods: {', '.join(f'`{method}`' for method in OTHER_METHODS)}."),
        "The column `kvzip` holds for `kvcompose`, too, which reads a prompt a second time as well.\n",
        *(_table(columns, titles) for columns in ([*KINDS, OTHERS], options)),
    ]
    return "\n".join(parts)


def wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_on_hyphens=False) + "\n"


def _table(columns: list[str], titles: dict[str, str]) -> str:
    found = cells()
    rows = [
        f"| family | {' | '.join(titles.get(column, column) for column in columns)} |",
        "|---" * (len(columns) + 1) + "|",
        *(f"| {title} | {' | '.join(found[name, column] for column in columns)} |" for name, title in TITLES.items()),
    ]
    return "\n".join(rows) + "\n"


def page_with(table: str) -> str:
    """docs/families.md with these tables in place of its own."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page_with(render()))
    print(f"wrote {PAGE.relative_to(Path.cwd())}")
