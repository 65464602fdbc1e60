"""Serving engines: what of a method they can do, and how they are told."""
