"""`python -m kvcompress bench`: what compression costs and saves, beside its peers; see docs/bench.md.

`models`: what is measured on; `contenders`: what takes turns; `grid`: the turns; `report`: what they amount to; `cli`.
`speech` is a bench of its own, for models that speak.
"""
