"""The measurements on a CUDA device, in three stages: is it right, is it fast, what does it buy. See docs/bench.md.

`stages`: which commands each stage runs; `runner`: runs them, one process each, and keeps their results; `summary`:
what came of them, beside the targets. The commands are the benchmarks and tests that are there anyway; `environment`,
`accuracy` and `speech` are the few of their own.
"""
