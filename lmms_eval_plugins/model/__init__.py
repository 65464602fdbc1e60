"""The lmms-eval model `kvcompress`, with a module for each step of answering a request; `lm.py` is the entry point."""
