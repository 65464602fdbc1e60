"""Evict blocks of a prompt in vLLM once it is prefilled, by a KV connector, an attention backend and a worker.

1. The scheduler's side of the connector names the requests whose prefill ends in a step, and their blocks.
2. The worker's side scores the blocks when the step is done. In the worker's block table, those that leave become
   vLLM's null block.
3. The scheduler's side is told, and gives them back to vLLM's pool.
4. The backend leaves null blocks out of what a query attends to. Keys are stored rotated, so those that stay keep their
   distances, and later tokens have their places as before.

Written for vLLM 0.32. Only the CPU's backend is replaced, and one process runs the model.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
    _get_attn_isa,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from ..errors import KVCompressError
from .blocks import BlockEvictor

NULL = 0  # vLLM's null block: the first of the pool


@dataclass
class Prefilled:
    """A prompt.

    Attributes:
        tokens: how many it has.
        blocks: the blocks that hold them.
        restarts: how often the request was preempted.
    """

    tokens: int
    blocks: list[int]
    restarts: int


@dataclass
class Told(KVConnectorMetadata):
    """What the scheduler tells the worker: request -> its prompt, if the prefill ends in this step."""

    prompts: dict[str, Prefilled] = field(default_factory=dict)


@dataclass
class Evicted(KVConnectorWorkerMetadata):
    """What the worker answers: request -> `Prefilled.restarts`, and the places in its list of blocks that are empty."""

    places: dict[str, tuple[int, list[int]]]

    def aggregate(self, other: "Evicted") -> "Evicted":
        raise NotImplementedError("kvcompress evicts in vLLM with one process for the model")


class EvictionConnector(KVConnectorBase_V1):
    """Both sides: the scheduler's and the worker's each have one."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        specs = {type(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups}
        if specs != {FullAttentionSpec} or len(kv_cache_config.kv_cache_groups) > 1:
            raise KVCompressError(
                "kvcompress evicts in vLLM where all layers have full attention: this model has others"
            )
        if (dtype := vllm_config.cache_config.cache_dtype) not in ("auto", "float32", "float16", "bfloat16"):
            raise KVCompressError(f"kvcompress cannot evict in vLLM with kv_cache_dtype={dtype!r}")
        self._size = vllm_config.cache_config.block_size
        self._evictor = BlockEvictor.of(**vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._requests: dict[str, Any] = {}  # in the scheduler
        self._evicted: dict[str, tuple[int, list[int]]] = {}  # in the worker: by the last step

    # -- in the scheduler

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False  # nothing is loaded from elsewhere

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> Told:
        told, cached = Told(), scheduler_output.scheduled_cached_reqs
        done = {each.req_id: each.num_computed_tokens for each in scheduler_output.scheduled_new_reqs}
        done |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, before in done.items():
            request = self._requests[name]
            tokens = request.num_prompt_tokens
            if before < tokens <= before + scheduler_output.num_scheduled_tokens[name]:
                (blocks,) = self._kv_cache_manager.get_block_ids(name)
                told.prompts[name] = Prefilled(tokens, blocks[: -(-tokens // self._size)], request.num_preemptions)
        return told

    def update_connector_output(self, connector_output: Any) -> None:
        evicted = connector_output.kv_connector_worker_meta
        (manager,) = self._kv_cache_manager.coordinator.single_type_managers
        for name, (restarts, places) in (evicted.places if evicted is not None else {}).items():
            request = self._requests.get(name)  # none if its first token was its last
            if request is not None and request.num_preemptions == restarts:
                for place in places:
                    manager._remove_blocks_in_range(name, place, place + 1)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        return False, None

    # -- in the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = list(kv_caches.values())
        size, width = self._layers[0].shape[2:]
        self._isa = _get_attn_isa(self._layers[0].dtype, size, width // 2)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        self._evicted = {}
        for name, prompt in self._get_connector_metadata().prompts.items():
            layers = (entries(layer, prompt.blocks, prompt.tokens, self._isa) for layer in self._layers)
            if places := self._evictor.evicted(layers, len(self._layers), prompt.tokens, self._size):
                self._evicted[name] = prompt.restarts, places

    def build_connector_worker_meta(self) -> Evicted | None:
        return Evicted(self._evicted) if self._evicted else None

    def empty(self, runner: Any) -> None:
        """Write the null block over the blocks that the last step evicted, wherever the worker knows them."""
        for name, (_, places) in self._evicted.items():
            if (state := runner.requests.get(name)) is None:
                continue
            for place in places:
                state.block_ids[0][place] = NULL
            if (row := runner.input_batch.req_id_to_index.get(name)) is not None:
                runner.input_batch.block_table[0].block_table.np[row, places] = NULL
        self._evicted = {}


def entries(layer: torch.Tensor, blocks: list[int], tokens: int, isa: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `tokens` keys and values, each (kv_heads, tokens, head_dim), of blocks of a layer's cache.

    `layer`: (blocks, kv_heads, size of a block, 2 * head_dim)."""
    _, heads, size, width = layer.shape
    parts = layer[blocks].reshape(len(blocks), heads, 2, -1).unbind(2)
    places = layout(isa, layer.dtype, size, width // 2)
    whole = (part[..., place].unflatten(-1, (size, -1)) for part, place in zip(parts, places, strict=True))
    keys, values = (part.transpose(0, 1).flatten(1, 2)[:, :tokens] for part in whole)
    return keys, values


@cache
def layout(isa: str, dtype: torch.dtype, size: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where a block has each number of its keys and of its values, token by token.

    The CPU's kernels lay them out as they read them, each in its own way; here they write numbers that say where."""
    numbers = torch.arange(size * width)
    found = torch.zeros(2, size * width, dtype=torch.long)
    for digit in (1, 256):  # whole numbers below 256 are exact in every dtype
        written = (numbers // digit % 256).view(size, 1, width).to(dtype)
        block = torch.zeros(1, 1, 2 * size, width, dtype=dtype)
        slots = torch.arange(size)
        ops.cpu_attn_reshape_and_cache(
            written, written, *block.chunk(2, dim=2), slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )
        found += digit * block.view(2, -1).long()
    keys, values = found.argsort(dim=1)
    return keys, values


def without_null(common: CommonAttentionMetadata, size: int) -> CommonAttentionMetadata:
    """Leave null blocks of `size` tokens out of what the queries attend to. They lie before all queries."""
    table, lengths = common.block_table_tensor, common.seq_lens
    used = torch.arange(table.shape[1], device=table.device) < -(-lengths[:, None] // size)
    is_null = (table == NULL) & used
    is_null &= (used & ~is_null).any(1, keepdim=True)  # a row of them only is not a request's
    if not is_null.any():
        return common
    order = is_null.to(torch.int8).argsort(dim=1, stable=True)
    return replace(
        common, block_table_tensor=table.gather(1, order), seq_lens=(lengths - size * is_null.sum(1)).to(lengths.dtype)
    )


class EvictingBuilder(CPUAttentionMetadataBuilder):
    """The CPU backend's, with blocks that were evicted left out."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        common = without_null(common_attn_metadata, self.block_size)
        return super().build(common_prefix_len, common, fast_build)


class EvictingBackend(CPUAttentionBackend):
    """The CPU's backend with `EvictingBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[EvictingBuilder]:
        return EvictingBuilder


class EvictingCPUWorker(CPUWorker):
    """vLLM's worker on a CPU, which empties its block table before a step."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{EvictingBackend.__name__}")
        super().load_model(*args, **kwargs)

    def execute_model(self, scheduler_output: Any) -> Any:
        get_kv_transfer_group().empty(self.model_runner)
        return super().execute_model(scheduler_output)
