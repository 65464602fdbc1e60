"""`kvcompress check`: does a method keep what every method promises?

`command`: the command line; `models`: what is tried on; `promises`: the checks; `reference`: the full cache under a
mask; `passed`: the files that passed.
"""
