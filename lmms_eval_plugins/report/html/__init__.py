"""Reports for reading and for papers: `python -m kvcompress report` and `python -m kvcompress show`."""
