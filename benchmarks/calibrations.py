"""Calibrate the calibrated methods on SmolLM2: `python -m benchmarks.calibrations`.

This writes benchmarks/results/calibrations_smollm2/METHOD.safetensors, from texts of benchmarks/retrieval.py that no
table uses. Vision methods learn nothing from them.
"""

import torch

from kvcompress.flag_types import path
from tiny_vlm.calibrate import calibrate_all

from .driver import new_parser, start
from .method_tasks import SMOLLM2_CALIBRATIONS
from .pretrained import load_smollm2
from .retrieval import draw_examples, prompt_of

TEXTS = 16
LARGE = ("expected-attention",)  # its file would be 4.5 MB, and it works without


def main(argv: list[str]) -> None:
    parser = new_parser("calibrations", __doc__)
    parser.add_argument("--out", type=path, default=SMOLLM2_CALIBRATIONS, help="folder")
    out = parser.parse_args(argv).out
    torch.set_num_threads(1)
    model, tokenizer = load_smollm2()
    prompts = [{"input_ids": torch.tensor([prompt_of(one, tokenizer)])} for one in draw_examples(TEXTS, "calibration")]
    data = f"{TEXTS} fresh texts of benchmarks/retrieval.py"
    calibrate_all(model, "SmolLM2-135M-Instruct", lambda: prompts, data, out, LARGE)


if __name__ == "__main__":
    start(main)
