"""The output projection of an attention module, split by heads."""

import torch

from ..errors import KVCompressError


def output_projection(module: torch.nn.Module | None, kv_heads: int, head_dim: int, method: str) -> torch.Tensor:
    """Return the output projection of each query head, (groups, kv_heads, head_dim, hidden) in fp32.

    This is the weight of the module's `o_proj`. Raises KVCompressError, naming `method`, if there is no such weight."""
    projection = getattr(module, "o_proj", None)
    weight = getattr(projection, "weight", None)
    if hasattr(weight, "to_local"):  # tensor parallel: the columns of this process's heads
        weight = weight.to_local()
    # Quantized weights are tensors of their own type, whatever dtype they report; of ours are those on a pretended GPU.
    kind = type(weight)
    is_plain = kind in (torch.Tensor, torch.nn.Parameter) or kind.__module__.startswith("kvcompress.")
    if not isinstance(projection, torch.nn.Linear) or not is_plain:
        raise KVCompressError(
            f"method '{method}' needs an attention with a linear, unquantized o_proj, not a {type(module).__name__} "
            f"with o_proj={type(projection).__name__}, weight={type(weight).__name__}"
        )
    if weight.is_meta:
        raise KVCompressError(
            f"method '{method}' needs the weight of o_proj, which is offloaded outside of its own pass"
        )
    return weight.float().unflatten(1, (kv_heads, -1, head_dim)).permute(2, 1, 3, 0)
