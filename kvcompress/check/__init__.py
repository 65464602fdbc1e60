"""`kvcompress check`: does a method keep the promises that every method makes?

`command` is the command line, `models` the models and prompts it runs on, `promises` the checks, `reference` the full
cache under a mask, and `passed` the record of files that passed.
"""
