"""The benchmark's model: a hub id, a local path, or a shape, which is a config with random weights."""

from typing import Any

from ..errors import KVCompressError, unknown_name


def _qwen2(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": tied,
    }


# The configs of the models with these names; llava-onevision-7b-lm is the language model of LLaVA-OneVision 7B.
SHAPES: dict[str, dict[str, Any]] = {
    "llava-onevision-7b-lm": _qwen2(3584, 18944, 28, 28, 4, 152128, False),
    "qwen2-0.5b": _qwen2(896, 4864, 24, 14, 2, 151936, True),
    "qwen2-7b": _qwen2(3584, 18944, 28, 28, 4, 152064, False),
    "llama-3-8b": {**_qwen2(4096, 14336, 32, 32, 8, 128256, False), "model_type": "llama"},
    "smollm2-135m": {
        **_qwen2(576, 1536, 30, 9, 3, 49152, True),
        "model_type": "llama",
        "max_position_embeddings": 8192,
    },
    "tiny": _qwen2(64, 128, 2, 4, 2, 512, True),
}
BUNDLED: dict[str, str] = {}  # name of a model that another package brings along -> its folder


def source(model: str | None, shape: str | None) -> dict[str, Any]:
    """Return the source for `standalone.load`, from either a model or a shape.

    A model is a hub id, a path or a name in `BUNDLED`. Raises KVCompressError."""
    if (model is None) == (shape is None):
        given = "" if model is None else f", not {model!r} and {shape!r}"
        raise KVCompressError(f"give either a model or --shape{given}")
    if shape is None:
        return {"pretrained": BUNDLED.get(model, model)}
    if shape not in SHAPES:
        raise unknown_name("there is no shape", shape, SHAPES)
    return {"config": SHAPES[shape]}
