"""The bundled vision-language model: its checkpoint, and readers of its questions."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
