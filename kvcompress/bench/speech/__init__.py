"""How soon an omni model speaks, with several KV caches side by side.

`command`: the command line; `run`: what it does; `prompts`: what is asked; `kinds`, `strategies`: the caches; `turns`:
cold starts, then warm rounds; `report`: the table.
"""
