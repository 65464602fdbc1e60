"""Hooks that connect compression to an unmodified model and disconnect it again."""
