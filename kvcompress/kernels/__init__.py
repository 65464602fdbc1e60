"""Kernels, each with a plain PyTorch reference."""
