"""`kvcompress bench`: the costs and savings of compression compared with other caches; see docs/bench.md.

`command` and `flags` are the command line. `shapes` names the measured models, `standalone` loads them and decodes,
`contenders` are the caches that take turns, `grid` the turns, `comparison`, `throughput` and `launches` the
measurements, `results` the file and page of every benchmark, and `report` the results of the turns. `cost` is what a
step must cost on a GPU. `kvcompress/speech` has a benchmark of its own, for models that speak."""
