"""`python -m lmms_eval_plugins.heatmap`: see report/heatmap.py."""

import sys

from .report.heatmap import main

if __name__ == "__main__":
    sys.exit(main())
