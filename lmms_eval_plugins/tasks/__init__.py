"""The bundled tasks. The folder also works with lmms-eval's own `--include_path`."""

from pathlib import Path

BUNDLED_TASKS = Path(__file__).parent
