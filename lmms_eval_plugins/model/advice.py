"""Advice after a cell's first answer on how to make the next ones faster."""

from transformers import PreTrainedModel

from kvcompress import KVCompressError
from kvcompress.bench.cost import launches_bind
from kvcompress.hooks.model import text_decoder, writing_part
from kvcompress.measure import Measurement

from .arguments import Compression, make_compression

STATIC = {"cache_implementation": "static"}


def static_advice(model: PreTrainedModel, compression: Compression, measured: Measurement) -> str | None:
    """Return a line that recommends fixed shapes, or None.

    They are recommended if they work with the compression and the measured decode step is bound by launches
    (kvcompress/bench/cost.py)."""
    if compression.options.get("cache_implementation", "dynamic") != "dynamic" or measured.tpot_s is None:
        return None
    try:
        make_compression(compression.method, compression.ratio, compression.budget, **{**compression.options, **STATIC})
    except KVCompressError:
        return None
    layers, weights = decoded_with(model)
    if not launches_bind(layers, weights, measured.kv_bytes_prompt, model.device):
        return None
    return (
        f"{len(measured.tokens_out)} rows, {weights / 1e9:.2g} GB of weights and {measured.kv_bytes_prompt / 1e9:.2g} "
        f"GB of cache keep this GPU busy for less time than launching a step's kernels takes: with "
        "cache_implementation=static a step is one graph, which the first answer compiles"
    )


def decoded_with(model: PreTrainedModel) -> tuple[int, int]:
    """Return the decoder's number of layers, and the bytes of weights that a decode step reads.

    These include the weights of the logits and, in a mixture of experts, all experts."""
    decoder, head = text_decoder(model), writing_part(model).get_output_embeddings()
    looked_up = {id(parameter) for parameter in decoder.get_input_embeddings().parameters()}
    read = [parameter for parameter in decoder.parameters() if id(parameter) not in looked_up]
    read += [] if head is None else head.parameters()
    return decoder.config.num_hidden_layers, sum(parameter.nbytes for parameter in read)
