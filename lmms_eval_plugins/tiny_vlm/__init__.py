"""The bundled vision-language model: its checkpoint, and the rendered world that it is asked about."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
