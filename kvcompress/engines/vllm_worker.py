"""vLLM's worker on a CPU, for models that prune."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class PruningCPUWorker(CPUWorker):
    """Sets what `load_model` of vLLM's GPU runner sets and that of its CPU runner forgets (seen in 0.32.0)."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.model_runner.is_multimodal_pruning_enabled = True
