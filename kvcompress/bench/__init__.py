"""`kvcompress bench`: the costs and savings of compression compared with other caches; see docs/bench.md.

`command`, `flags`: the command line; `shapes`, `models`: what is measured on; `contenders`: what takes turns; `grid`:
the turns; `comparison`, `throughput`, `launches`: what is measured; `results`: file and page of every benchmark;
`report`: what the turns amount to. `speech` is a bench of its own, for models that speak.
"""
