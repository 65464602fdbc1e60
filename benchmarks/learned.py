"""Calibrate and train on the pretrained Qwen2 what `python -m benchmarks.ruler` asks: `python -m benchmarks.learned`.

The text is Python's own language reference, which comes with Python; no table asks about it. Calibrations are written
to benchmarks/results/learned_qwen2/METHOD.safetensors, checkpoints to results/learned_qwen2/, with a note of each as
METHOD.json beside the calibrations. Hours on two CPU cores; a training that was cut goes on.
"""

import hashlib
import json
import platform
from pathlib import Path

from kvcompress.__main__ import main as command
from kvcompress.files import write_text

from .driver import RESULTS, new_parser, start
from .pretrained import export

MODEL = Path("results/Qwen2.5-Coder-0.5B-Instruct")
CHECKPOINTS = Path("results/learned_qwen2")
NOTES = RESULTS / "learned_qwen2"
# Fewer and shorter pieces and steps than the authors', and a smaller window, as prompts of 1,024 tokens have.
CALIBRATED = {
    "q-filters": "calibrate {model} --method q-filters --text {text} --length 1024 --questions 16",
    "triattention": "calibrate {model} --method triattention --text {text} --length 1024 --questions 16",
    "duoattention": "train duoattention {model} --text {text} --dtype bfloat16 steps=100 shortest=500 longest=1500 "
    "passkeys=5 words=16 sinks=16 recent=64",
}
TRAINED = {
    "kvzap": "train kvzap {model} --text {text} --dtype bfloat16 pieces=48 tokens=400",
    "fastkvzip": "train fastkvzip {model} --text {text} --dtype float32 pieces=10 length=4000 tokens=2000 steps=1500",
}


def python_text(file: Path) -> Path:
    """Write the language reference, and return the file."""
    from pydoc_data.topics import topics

    write_text(file, "\n\n".join(topics[name] for name in sorted(topics)))
    return file


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of all files in a folder."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.is_file())).hexdigest()


def learn(method: str, model: Path, text: Path, checkpoints: Path, notes: Path) -> None:
    """Write what a method needs, unless it is there."""
    is_calibrated = method in CALIBRATED
    out = notes / f"{method}.safetensors" if is_calibrated else checkpoints / method
    if out.exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    words = (CALIBRATED | TRAINED)[method].format(model=model, text=text).split()
    if code := command([*words, "--out", str(out)]):
        raise SystemExit(code)
    if not is_calibrated:
        note = {
            "checkpoint": str(out),
            "sha256": digest(out),
            "made by": f"kvcompress {' '.join(words)}",
            "text": f"the language reference of Python {platform.python_version()}",
        }
        write_text(notes / f"{method}.json", json.dumps(note, indent=1) + "\n")


def main(argv: list[str]) -> None:
    parser = new_parser("learned", __doc__)
    known = [*CALIBRATED, *TRAINED]
    parser.add_argument("methods", nargs="*", choices=[[], *known], help="default: all")
    given = parser.parse_args(argv)
    model, text = export("qwen2", MODEL), python_text(CHECKPOINTS / "python.txt")
    for method in given.methods or known:
        learn(method, model, text, CHECKPOINTS, NOTES)


if __name__ == "__main__":
    start(main)
