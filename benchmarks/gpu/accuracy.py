"""Exact match of the bundled model on the device and on the CPU, with the same questions, methods and ratio.

The questions are the first ones of `tiny_textvqa`, drawn again, so neither lmms-eval nor a parquet reader is needed.
The prompt is built here, since transformers' processor needs torchvision. Needs Pillow."""

import json

import torch
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

import kvcompress
from benchmarks.driver import FOLDER, new_parser, start
from kvcompress.files import write_text
from lmms_eval_plugins.tiny_vlm import CHECKPOINT
from lmms_eval_plugins.tiny_vlm.questions import POST_PROMPT, Example
from tiny_vlm.examples import draw_examples
from tiny_vlm.signs import GRID, HEADLINE_KINDS

RATIO = 0.1
WINDOW = {"window_size": 8}
METHODS = {"full": {}, "random": {}, "streamingllm": {}, "snapkv": WINDOW, "adakv": WINDOW, "pyramidkv": WINDOW}
METHODS |= {"h2o": {}}
IMAGE_TOKENS = GRID * GRID + GRID * (GRID + 1)  # the base view, and the grid view with its newlines
NEW_TOKENS = 8
BATCH = 25


class Reader:
    """The bundled model on a device."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)
        self.model = AutoModelForImageTextToText.from_pretrained(CHECKPOINT, dtype=dtype).eval().to(device)

    def inputs(self, examples: list[Example]) -> dict[str, torch.Tensor]:
        """Return model inputs with one row per question, as the processor makes them of a picture of the tower's size.

        The processor passes such a picture twice."""
        texts = [
            f"<|im_start|>user {'<image>' * IMAGE_TOKENS}\n{example.question.text.capitalize()}{POST_PROMPT}<|im_end|>"
            "<|im_start|>assistant\n"
            for example in examples
        ]
        inputs = dict(self.tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False))
        pixels = torch.stack([torch.tensor(example.pixels) for example in examples]).permute(0, 3, 1, 2)
        inputs["pixel_values"] = (pixels.to(self.model.dtype) / 127.5 - 1)[:, None].repeat(1, 2, 1, 1, 1)
        inputs["image_sizes"] = torch.tensor([pixels.shape[2:]] * len(examples))
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}

    @torch.no_grad()
    def right(self, examples: list[Example], method: str) -> list[bool]:
        """Return whether each question is answered correctly."""
        found = []
        for first in range(0, len(examples), BATCH):
            some = examples[first : first + BATCH]
            inputs = self.inputs(some)
            ratio = None if method == "full" else RATIO
            with kvcompress.compress(self.model, method, ratio, max_new_tokens=NEW_TOKENS, **METHODS[method]):
                output = self.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
            new = output[:, inputs["input_ids"].shape[1] :]
            answers = self.tokenizer.batch_decode(new, skip_special_tokens=True)
            found += [answer.strip() == one.question.answer for answer, one in zip(answers, some, strict=True)]
        return found


def main(argv: list[str]) -> None:
    parser = new_parser("gpu.accuracy", __doc__, "--questions", device="cuda", out=FOLDER / "gpu" / "accuracy")
    given = parser.parse_args(argv)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    examples = draw_examples(given.questions, HEADLINE_KINDS, "validation")
    tables: dict[str, dict[str, list[bool]]] = {}
    runs = {
        "device": (torch.device(given.device), torch.float32),
        "cpu": (torch.device("cpu"), torch.float32),
        "device bf16": (torch.device(given.device), torch.bfloat16),
    }
    for name, where in runs.items():
        reader, tables[name] = Reader(*where), {}
        for method in METHODS:
            tables[name][method] = reader.right(examples, method)
            print(f"{name}: {method}: {sum(tables[name][method])} of {len(examples)}", flush=True)
            content = {"questions": len(examples), "ratio": RATIO, "tables": tables}
            write_text(given.out.with_suffix(".json"), json.dumps(content) + "\n")


if __name__ == "__main__":
    start(main)
