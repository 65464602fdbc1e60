"""For methods that know the answer: the model gives it on its full cache first, and every layer sees what that needs.
Nothing of it is stored."""

import torch
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..errors import KVCompressError
from .second_reading import DecoderInputs, embedded


@torch.no_grad()
def look_ahead(
    model: PreTrainedModel,
    decoder: PreTrainedModel,
    inputs: DecoderInputs,
    logits: torch.Tensor | None,
    cache: CompressedCache,
) -> None:
    """Answer the prompt that waits in the cache, greedily; each layer scores its entries.

    `inputs`, `logits` (batch, columns, vocabulary): what the prompt's pass took and gave.
    """
    waiting = [layer for layer in cache.compressed_layers if layer.waiting is not None]
    if not waiting:
        return
    head = model.get_output_embeddings()
    if head is None or logits is None:
        raise KVCompressError(
            f"method {cache.policy.method!r} lets the model answer first: {type(model).__name__} has no logits"
        )
    ends = model.generation_config.eos_token_id
    ends = torch.tensor([] if ends is None else ends, dtype=torch.long, device=logits.device)
    seen, tokens = cache.seen_tokens, logits[:, -1:].argmax(-1)
    over = torch.zeros_like(tokens, dtype=torch.bool)
    pads = over[:, :0]
    for layer in waiting:
        layer.look_ahead()
    with cache.other_layers_unchanged():
        for _ in range(cache.policy.cluster.answer_tokens):
            over = over | torch.isin(tokens, ends)
            if over.all():
                break
            pads = torch.cat([pads, over], dim=1)
            for layer in waiting:
                layer.foresees(pads.to(layer.device))
            embeddings, by_layer = embedded(decoder, tokens)
            fed = {"inputs_embeds": embeddings} | ({} if by_layer is None else {"per_layer_inputs": by_layer})
            output = decoder(
                **fed,
                position_ids=inputs.following(seen, pads)[..., -1:],
                past_key_values=cache,
                use_cache=True,
            )
            tokens = head(output.last_hidden_state[:, -1:]).argmax(-1)
    for layer in waiting:
        layer.looked_ahead()
