"""`python -m lmms_eval_plugins.metrics`: see report/metrics_command.py, and report/metrics.py for the arithmetic."""

import sys

from .report.metrics_command import main

if __name__ == "__main__":
    sys.exit(main())
