"""The device of these tests."""

import pytest
import torch

from tests.gpu.cases import ON_CPU


@pytest.fixture(scope="session")
def device() -> torch.device:
    """CUDA, or the CPU where GPU_TESTS_ON=cpu asks for it."""
    if ON_CPU:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def cuda(device) -> torch.device:
    """For what no CPU can do."""
    if device.type != "cuda":
        pytest.skip("only CUDA does this")
    return device
