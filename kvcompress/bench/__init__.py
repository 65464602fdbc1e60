"""What compression costs and saves, beside its peers: `kvcompress bench`; see docs/bench.md.

`command`: the command line; `shapes`, `models`: what is measured on; `contenders`: what takes turns; `grid`: the turns;
`comparison`, `throughput`: what is measured; `report`: what it amounts to. `speech` is a bench of its own, for models
that speak.
"""
