"""Compression inside transformers' own continuous batching, for text models."""

from .session import PagedSession, compress

__all__ = ["PagedSession", "compress"]
