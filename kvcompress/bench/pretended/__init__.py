"""A CUDA device that is none: what would be launched, copied and waited for on one is counted, on a CPU.

`tensors`: tensors that say they are on the device, and what each operation costs there; `device`: the context in which
PyTorch and Triton take it for a device; `counts`: what was counted.
"""
