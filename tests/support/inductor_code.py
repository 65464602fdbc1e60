"""`python -m tests.support.inductor_code METHOD...`: compile decode steps in fixed shapes for an H100, without one.

Each step is captured on a CPU with the operator for CUDA, and compiled by Inductor from inputs that have a shape and a
device but no numbers. Prints, per method, what the compiled code launches.

Parts of PyTorch stay replaced, so this needs a process of its own."""

import inspect
import json
import re
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.device_interface as device_interface
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config
import torch._inductor.fx_passes.joint_graph as joint_graph
import triton
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen2Config, Qwen2ForCausalLM
from triton.backends.compiler import GPUTarget

import kvcompress
from kvcompress.bench.pretended.device import H200, PretendedCuda, _torch_cuda
from kvcompress.cache.storage import new
from kvcompress.cache.storage.static import StaticStorage

OPERATOR = "torch.ops.kvcompress.static_decode.default"
OF_OPERATOR = 2  # kernels: `_attend` and `combine`
NEW = 8


def config(layers: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=512, hidden_size=896, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=14,
        num_key_value_heads=2,
    )  # fmt: skip


class AsOnCuda(StaticStorage):
    """Does on a CPU what CUDA does."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.decodes_in_place = True


def captured(method: str, layers: int) -> tuple[list[tuple[torch.fx.GraphModule, list]], int]:
    """Return the graphs of the steps after two prompts, with their inputs, and the number of graph breaks."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config(layers)).eval().to(torch.bfloat16)
    graphs: list = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Any:
        graphs.append((graph, inputs))
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(model.__call__, backend=backend, dynamic=False)
    ids = torch.randint(8, 500, (2, 300))
    ratio = None if method == "full" else 0.2
    with torch.no_grad(), kvcompress.attach(model):
        for _ in range(2):
            cache = kvcompress.CompressedCache(
                model.config, method, ratio, max_new_tokens=NEW, cache_implementation="static"
            )
            model(ids, past_key_values=cache)
            for place in range(300, 300 + NEW):
                step(input_ids=ids[:, :1], position_ids=torch.full((2, 1), place), past_key_values=cache)
    return graphs, sum(torch._dynamo.utils.counters["graph_break"].values())


def moved_to_cuda(graph: torch.fx.GraphModule, inputs: list) -> list:
    """Move the graph to a CUDA device; return its inputs there, without numbers."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        with mode:
            return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="cuda")

    def argument(given: Any) -> Any:
        is_cpu = isinstance(given, (str, torch.device)) and str(given) == "cpu"
        return torch.device("cuda", 0) if is_cpu else given

    for node in graph.graph.nodes:
        node.args, node.kwargs = (torch.fx.node.map_aggregate(part, argument) for part in (node.args, node.kwargs))
        node.meta.pop("example_value", None)
    for name, part in [*graph.named_buffers(), *graph.named_parameters()]:
        owner, _, leaf = name.rpartition(".")
        setattr(graph.get_submodule(owner), leaf, tensor(part))
    graph.recompile()
    return [tensor(each) for each in inputs]


def pretend_an_h100() -> None:
    """Make PyTorch and Triton answer the compiler's questions about a device."""
    for name, stand_in in _torch_cuda(PretendedCuda()).items():
        setattr(torch.cuda, name, stand_in)
    known = {"type": "cuda", "index": 0, "cc": 90, "major": 9, **vars(H200)}
    properties = DeviceProperties(**{name: known.get(name) for name in inspect.signature(DeviceProperties).parameters})
    DeviceProperties.create = classmethod(lambda cls, device: properties)
    for interface in (device_interface.CudaInterface, device_interface.CudaInterface.Worker):
        interface.get_device_properties = staticmethod(lambda *of: SimpleNamespace(**vars(H200)))
        interface.current_device = staticmethod(lambda: 0)
    device_interface.CudaInterface.get_compute_capability = staticmethod(lambda *of: 90)
    device_interface.CudaInterface.is_available = staticmethod(lambda: True)
    for name in ("exchange_device", "maybe_exchange_device"):
        setattr(device_interface.CudaInterface, name, staticmethod(lambda device: 0))
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(("torch._inductor", "torch.utils._triton", "torch._dynamo")):
            for name in vars(module).keys() & {"has_triton", "has_triton_package"}:
                setattr(module, name, lambda *of: True)
            for name in vars(module).keys() & {"has_triton_stable_tma_api", "has_triton_tma_device"}:
                setattr(module, name, lambda *of: False)
    of_device = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        utils=SimpleNamespace(get_device_properties=lambda device: of_device),
    )
    triton.runtime.driver.set_active(driver)
    joint_graph.lazy_init = lambda *of: None


class Stop(Exception):
    """Raised once the code is generated, before it is compiled."""


def inductor_code(graph: torch.fx.GraphModule, inputs: list) -> str:
    """Return the code that Inductor generates for CUDA."""
    code = []

    def stop(lowering: GraphLowering) -> None:
        code.append(lowering.codegen()[0].value)
        assert lowering.disable_cudagraphs_reason is None, lowering.disable_cudagraphs_reason
        raise Stop

    GraphLowering.compile_to_module = stop
    options = {
        "compile_threads": 1, "fx_graph_cache": False, "joint_graph_constant_folding": False, "triton.cudagraphs": True,
        "triton.autotune_at_compile_time": False,
    }  # fmt: skip
    try:
        with torch.no_grad(), torch._inductor.config.patch(options):
            compile_fx.compile_fx(graph, inputs)
    except Exception as error:  # PyTorch wraps what is raised inside
        if not (isinstance(error, Stop) or isinstance(getattr(error, "inner_exception", None), Stop)):
            raise
    return code[0]


def launched(code: str) -> Counter:
    """Count kernels by kind."""
    code = "\n".join(line for line in code.splitlines() if not line.strip().startswith("#"))
    found = Counter({"triton": len(re.findall(r"triton_\w+\.run\(", code))})
    found.update(re.findall(r"(extern_kernels\.\w+)\(", code))
    found.update(re.findall(r"= (torch\.ops\.[\w.]+)\(", code))
    return found


def main() -> None:
    new.StaticStorage = AsOnCuda
    cases = {(method, layers): captured(method, layers) for method in sys.argv[1:] for layers in (2, 3)}
    pretend_an_h100()
    for (method, layers), (graphs, breaks) in cases.items():
        found = launched(inductor_code(graphs[0][0], moved_to_cuda(*graphs[0])))
        kernels = found.total() + (OF_OPERATOR - 1) * found[OPERATOR]
        about = {"method": method, "layers": layers, "graphs": len(graphs), "breaks": breaks, "kernels": kernels}
        print(json.dumps({**about, "launched": found}))


if __name__ == "__main__":
    main()
