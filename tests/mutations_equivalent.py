"""Faults of `tests.faults` that change nothing anyone could notice: name -> why."""

EQUIVALENT: dict[str, str] = {}
