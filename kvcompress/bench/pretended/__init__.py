"""A pretended CUDA device: counts, on a CPU, the kernels, copies and waits that a real one would have.

`tensors` has tensors that claim to be on the device, and the cost of each operation there; `device` the context in
which PyTorch and Triton see a device; `counts` the counters.
"""
