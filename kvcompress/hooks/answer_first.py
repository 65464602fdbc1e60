"""For methods that know the answer: the model first answers on its full cache, and every layer scores its entries.

Nothing of the answer is stored."""

import torch
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..cache_name import CACHE
from ..device import on_device
from ..errors import KVCompressError
from ..policy.policy import Policy
from .second_reading import DecoderInputs, embedded


def check_answers(model: PreTrainedModel, policy: Policy, return_dict: bool | None = True) -> None:
    """Raise KVCompressError if a method lets the model answer first but the forward pass does not return logits.

    `return_dict` is the argument of the pass, None for the model's default."""
    if policy.cluster.second_pass != "answer":
        return
    problem = None
    if model.get_output_embeddings() is None:
        problem = f"{type(model).__name__} has no logits"
    elif not (model.config.return_dict if return_dict is None else return_dict):
        problem = "with return_dict=False its logits have no name; leave it True"
    if problem is not None:
        raise KVCompressError(f"method {policy.method!r} lets the model answer first: {problem}")


@torch.no_grad()
def answer_first(
    model: PreTrainedModel,
    decoder: PreTrainedModel,
    inputs: DecoderInputs,
    logits: torch.Tensor,
    cache: CompressedCache,
) -> None:
    """Answer the prompt that waits in the cache, greedily; each layer scores its entries.

    `inputs` and `logits` (batch, columns, vocabulary) are those of the prompt's forward pass.
    """
    head = model.get_output_embeddings()
    ends = model.generation_config.eos_token_id
    device = inputs.embeddings.device  # on a model on several devices, logits are on another
    ends = on_device([] if ends is None else ends, device, torch.long)
    seen, tokens = cache.seen_tokens, logits[:, -1:].argmax(-1).to(device)
    over = torch.zeros_like(tokens, dtype=torch.bool)
    pads = over[:, :0]
    answers = [layer.begin_answer() for layer in cache.compressed_layers]
    with cache.other_layers_unchanged():
        for _ in range(cache.policy.cluster.answer_tokens):
            over = over | torch.isin(tokens, ends)
            if over.all():
                break
            pads = torch.cat([pads, over], dim=1)
            for answer in answers:
                answer.pads = pads.to(answer.pads.device)
            embeddings, by_layer = embedded(decoder, tokens)
            fed = {"inputs_embeds": embeddings} | ({} if by_layer is None else {"per_layer_inputs": by_layer})
            output = decoder(
                **fed, position_ids=inputs.following(seen, pads)[..., -1:], use_cache=True, **{CACHE: cache}
            )
            tokens = head(output.last_hidden_state[:, -1:]).argmax(-1).to(device)
    for layer in cache.compressed_layers:
        layer.end_answer()
