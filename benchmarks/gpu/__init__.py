"""Measurements on a CUDA device in three stages: correctness, speed, and gains. See docs/bench.md.

`stages` defines the commands of each stage, `runner` runs them in a process each and keeps their results, and `summary`
compares the results with the targets. The commands are existing benchmarks and tests, and `environment`, `accuracy` and
`speech` here."""
