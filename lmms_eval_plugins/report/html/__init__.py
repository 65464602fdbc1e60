"""Reports for reading and for papers: `kvcompress report` and `kvcompress show`."""
