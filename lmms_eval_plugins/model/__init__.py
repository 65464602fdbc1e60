"""The lmms-eval model `kvcompress`, with a module for each step of answering a request; `lm.py` is the entry point."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lm import KVCompressLM

__all__ = ["KVCompressLM"]


def __getattr__(name: str) -> Any:
    if name != "KVCompressLM":
        raise AttributeError(name)
    from .lm import KVCompressLM  # imports lmms-eval, which takes seconds; parsing arguments does not need it

    return KVCompressLM
