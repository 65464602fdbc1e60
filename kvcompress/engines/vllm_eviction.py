"""vLLM evicts blocks of a prompt once it is prefilled: what a KV connector, an attention backend and a worker do for it.

1. The scheduler's side of the connector names the requests whose prefill ends in a step, and their blocks.
2. The worker's side scores the blocks when the step is done, and answers with those that leave.
3. The scheduler's side gives them back to vLLM's pool, where their entry in the request's list becomes the null block;
   in the next step it tells the worker, whose block table gets the null block, too.
4. The backend leaves null blocks out of what a query attends to. Keys are stored with their rotation, so those that stay
   keep their distances, and a request's later tokens still have their places.

Written for vLLM 0.32; only the CPU's backend is replaced. One process runs the model.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from vllm import _custom_ops as ops
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
from vllm.v1.worker.cpu_worker import CPUWorker

from .blocks import BlockEvictor

NULL = 0  # vLLM's null block: the first of the pool


@dataclass
class Told(KVConnectorMetadata):
    """What the scheduler tells the worker in a step.

    Attributes:
        ended: request -> tokens of its prompt and the blocks that hold them; its prefill ends in this step.
        evicted: request -> places in its list of blocks that have become the null block.
    """

    ended: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    evicted: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Leaving(KVConnectorWorkerMetadata):
    """What the worker answers: request -> places in its list of blocks that leave."""

    places: dict[str, list[int]]

    def aggregate(self, other: "Leaving") -> "Leaving":
        raise NotImplementedError("kvcompress evicts in vLLM with one process for the model")


class EvictionConnector(KVConnectorBase_V1):
    """Both sides: the scheduler's and the worker's each have one."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._size = vllm_config.cache_config.block_size
        self._evictor = BlockEvictor.of(**vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._prompts: dict[str, int] = {}  # request -> tokens of its prompt
        self._evicted: dict[str, list[int]] = {}  # of the last step
        self._leaving: dict[str, list[int]] = {}

    # -- in the scheduler

    def on_new_request(self, request: Any) -> None:
        self._prompts[request.request_id] = request.num_prompt_tokens

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False  # nothing is loaded from elsewhere

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> Told:
        told, self._evicted = Told(evicted=self._evicted), {}
        cached = scheduler_output.scheduled_cached_reqs
        done = {each.req_id: each.num_computed_tokens for each in scheduler_output.scheduled_new_reqs}
        done |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request, before in done.items():
            prompt = self._prompts[request]
            if before < prompt <= before + scheduler_output.num_scheduled_tokens[request]:
                (blocks,) = self._kv_cache_manager.get_block_ids(request)
                told.ended[request] = prompt, blocks[: -(-prompt // self._size)]
        return told

    def update_connector_output(self, connector_output: Any) -> None:
        leaving = connector_output.kv_connector_worker_meta
        (manager,) = self._kv_cache_manager.coordinator.single_type_managers
        for request, places in (leaving.places if leaving is not None else {}).items():
            if request in manager.req_to_blocks:  # it has not ended with its first token
                for place in places:
                    manager._remove_blocks_in_range(request, place, place + 1)
                self._evicted[request] = places

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._prompts.pop(request.request_id, None)
        self._evicted.pop(request.request_id, None)
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
        for request, (tokens, blocks) in self._get_connector_metadata().ended.items():
            layers = [entries(layer, blocks, tokens, self._isa) for layer in self._layers]
            if places := self._evictor.evicted(layers, self._size):
                self._leaving[request] = places

    def build_connector_worker_meta(self) -> Leaving | None:
        leaving, self._leaving = self._leaving, {}
        return Leaving(leaving) if leaving else None


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
    """vLLM's worker on a CPU, which writes the null block into its block table where a block was evicted."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{EvictingBackend.__name__}")
        super().load_model(*args, **kwargs)

    def execute_model(self, scheduler_output: Any) -> Any:
        runner, told = self.model_runner, scheduler_output.kv_connector_metadata
        for request, places in (told.evicted if told is not None else {}).items():
            state = runner.requests.get(request)
            if state is None:
                continue
            for place in places:
                state.block_ids[0][place] = NULL
            if (row := runner.input_batch.req_id_to_index.get(request)) is not None:
                runner.input_batch.block_table[0].block_table.np[row, places] = NULL
        return super().execute_model(scheduler_output)
