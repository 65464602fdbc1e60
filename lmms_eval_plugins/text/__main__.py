"""lm-evaluation-harness's own command, with `--model kvcompress`:

    python -m lmms_eval_plugins.text run --model kvcompress --model_args pretrained=ID,method=snapkv,ratio=0.2 \\
        --tasks gsm8k

Releases of lm-eval that read the entry-point group `lm_eval.models` find the model themselves, as `lm-eval run`.
"""

import sys

from kvcompress.command_line import fail
from kvcompress.errors import KVCompressError

from ..cells.names import check_lm_eval

MODEL = "lmms_eval_plugins.text.model:KVCompressTextLM"


def main() -> int:
    """Run lm-eval's command and return the exit code: 2 if lm-eval is not installed or an argument is wrong."""
    try:
        check_lm_eval()
    except KVCompressError as error:
        return fail(error, 2)
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    if "kvcompress" not in model_registry:
        model_registry.register("kvcompress", target=MODEL)
    try:
        cli_evaluate()
    except KVCompressError as error:
        return fail(error, 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
