"""`python -m kvcompress speech`: how soon an omni model speaks, with several KV caches side by side.

`prompts`: what is asked; `strategies`: the caches; `turns`: cold starts, then warm rounds; `report`: the table;
`command`: the command line.
"""

from .command import main

__all__ = ["main"]
