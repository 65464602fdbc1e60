"""`kvcompress bench`: the costs and savings of compression compared with other caches; see docs/bench.md.

`command` and `flags` are the command line. `shapes` and `models` define the measured models, `contenders` the caches
that take turns, `grid` the turns, `comparison`, `throughput` and `launches` the measurements, `results` the file and
page of every benchmark, and `report` the results of the turns. `kvcompress/speech` has a benchmark of its own, for
models that speak."""
