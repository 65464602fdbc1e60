"""Calibrating a method: the model reads each prompt once, and the method measures every layer."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache.cache import CompressedCache
from ..cache.layer import CompressedLayer
from ..cache.scope import States
from ..cache_name import CACHE
from ..clusters.base import make_cluster
from ..clusters.calibrated import CalibratedKVCluster, options_of
from ..errors import KVCompressError, one_line
from ..hooks.model import text_decoder, unwrapped
from ..hooks.rotary import watch_rotary
from ..hooks.session import attach
from ..methods import list_methods, method_info
from ..scoring.returned import unchanged
from .files import Calibration, ModelIdentity, check_tensors

Sums = dict[str, torch.Tensor]


def calibrated_method(method: str, **options: object) -> tuple[str, CalibratedKVCluster]:
    """Return a calibrated method's name and cluster. Raises KVCompressError for any other method."""
    info = method_info(method)
    if not issubclass(info.cls, CalibratedKVCluster):
        names = [name for name, each in list_methods().items() if issubclass(each.cls, CalibratedKVCluster)]
        raise KVCompressError(f"method {info.name!r} is not calibrated; calibrated methods: {', '.join(names)}")
    if "calibration" in options:
        raise KVCompressError("calibration= is the result of calibrating; leave it out")
    return info.name, make_cluster(info.name, **options)


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    method: str,
    prompts: Iterable[Mapping[str, torch.Tensor]],
    data: str = "",
    seed: int | None = None,
    **options: object,
) -> Calibration:
    """Gather the statistics of `model` that `method` needs, over prompts.

    ```python
    calibration = kvcompress.calibrate(model, "q-filters", map(processor, prompts))
    kvcompress.calibration.files.save(calibration, Path("q-filters.safetensors"))
    ```

    Args:
        model: as for `compress`.
        method: a calibrated method.
        prompts: model inputs, `input_ids` and the inputs of its images, each with a batch of one.
        data: where the prompts come from; recorded in the file.
        seed: the seed by which they were drawn; recorded in the file.
        options: options of the method.

    Raises:
        KVCompressError: for a method that is not calibrated, no prompts, a batch of several, or a prompt or model that
            the method cannot use.
    """
    name, cluster = calibrated_method(method, **options)
    inner = unwrapped(model)
    sums: Sums = {}
    count = tokens = 0
    sizes = (0, 0, 0)
    with attach(model), without_dropout(inner):
        for prompt in prompts:
            gathered, sizes = _read(inner, cluster, dict(prompt))
            by_layer = {key: torch.stack([layer[key] for layer in gathered]) for key in gathered[0]}
            for key, part in cluster.of_prompt(by_layer).items():
                sums[key] = sums[key] + part if key in sums else part
            count, tokens = count + 1, tokens + prompt["input_ids"].shape[1]
    if not count:
        raise KVCompressError("there is no prompt to calibrate on")
    heads, kv_heads, head_dim = sizes
    said = ModelIdentity.of(inner.config, len(gathered))
    identity = replace(said, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    known = {key: part.float() for key, part in cluster.known_from(sums).items()}
    check_tensors(known, identity, cluster.calibrated)
    return Calibration(name, identity, known, options_of(cluster), data, count, tokens, seed)


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Context manager in which a model is in eval mode: dropout would be measured with it."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _read(
    model: PreTrainedModel, cluster: CalibratedKVCluster, prompt: dict[str, Any]
) -> tuple[list[Sums], tuple[int, int, int]]:
    """Return what each compressed layer gathered, in float64 on the CPU, and its heads, KV heads and head dimension."""
    if len(prompt["input_ids"]) != 1:
        raise KVCompressError(f"a prompt to calibrate on must have a batch of one, not of {len(prompt['input_ids'])}")
    cache = CompressedCache(model.config)
    gathered: dict[int, Sums] = {}
    sizes: dict[int, tuple[int, int, int]] = {}

    def look(layer: CompressedLayer, states: States, store: Callable[[], None]) -> None:
        place = layer.choice.place
        queries, keys = states.queries, states.keys
        view = layer.choice.view(cache.announced, cache.announced.lengths, states, layer.memory)
        asked = f"{type(cluster).__name__}.gather"
        with unchanged(asked, queries, keys, states.values):
            found = cluster.gather(queries, keys, states.values, view)
        if not isinstance(found, dict) or not all(isinstance(part, torch.Tensor) for part in found.values()):
            raise KVCompressError(f"{asked} returned {one_line(found, 80)}: it must be a dict of tensors")
        gathered[place] = {key: part.cpu().double() for key, part in found.items()}
        sizes[place] = queries.shape[1], keys.shape[1], keys.shape[3]
        store()

    for layer in cache.compressed_layers:
        layer.listen(partial(look, layer))
    few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with ExitStack() as hooks:
        for hook in watch_rotary(text_decoder(model), cache.rotate) if cluster.watches_rotary else ():
            hooks.enter_context(hook)
        model(**prompt, use_cache=True, **{CACHE: cache}, **few)
    if len(set(sizes.values())) != 1:
        raise KVCompressError(
            f"a {model.config.model_type} model's layers differ in their heads: {sorted(set(sizes.values()))} (heads, "
            "KV heads, head dimension); a calibration has one size"
        )
    return [gathered[place] for place in sorted(gathered)], sizes[0]
