"""The bundled vision-language model: its rendered world, its training, its checkpoint."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
