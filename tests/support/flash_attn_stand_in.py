"""flash_attention_2 on a machine without a GPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import modeling_flash_attention_utils as flash_utils

FAKE_FLASH_ATTN = Path(__file__).parent / "fake_flash_attn"


@contextmanager
def flash_attn_stand_in() -> Iterator[None]:
    """Context manager in which `attn_implementation="flash_attention_2"` works on the CPU, in plain PyTorch.

    transformers is told that the package is installed and that the CPU supports it; the rest (choice of the function,
    unpadding, masks) is transformers' own code."""

    def yes(*args: object, **kwargs: object) -> bool:
        return True

    with pytest.MonkeyPatch.context() as patch:
        for name in _flash_attn_modules():  # if the real package is installed
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(str(FAKE_FLASH_ATTN))
        patch.setattr(flash_utils, "is_flash_attn_2_available", yes)
        matrix = flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
        patch.setitem(matrix, 2, matrix[2] | {"general_availability_check": yes, "supported_devices": ((yes, "cpu"),)})
        # Modules that transformers has loaded and keeps for the whole process.
        loaded = [name for name in vars(flash_utils) if name.startswith("_") and name.endswith("_fn")]
        for name in ("_loaded_implementation", *loaded):
            patch.setattr(flash_utils, name, None)
        try:
            yield
        finally:
            for name in _flash_attn_modules():
                del sys.modules[name]


def _flash_attn_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]
