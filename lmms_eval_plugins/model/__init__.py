"""The lmms-eval model `kvcompress`, a module per step of a request's way; `lm.py` is where it begins and ends."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lm import KVCompressLM

__all__ = ["KVCompressLM"]


def __getattr__(name: str) -> Any:
    if name != "KVCompressLM":
        raise AttributeError(name)
    from .lm import KVCompressLM  # takes seconds: lmms-eval comes with it, which whoever reads arguments can do without

    return KVCompressLM
