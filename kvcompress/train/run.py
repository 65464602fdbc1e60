"""A training run that resumes where it was interrupted: its state beside the output, and the loop of gradient steps."""

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..calibration.text import read_text
from ..errors import KVCompressError, one_line
from ..files import UNFINISHED, parse_json, write_text, write_torch
from ..hooks.model import text_decoder, unwrapped
from ..hooks.model_identity import weights_fingerprint

SAVE_EVERY_S = 60.0  # seconds of gradient steps that a cut may lose
SETTINGS, DESCENT = "settings.json", "descent.pt"  # files of the state; the others hold what was read
UNREADABLE = (OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError, UnpicklingError)
READING = ("method", "model", "dtype", "text", "seed", "pieces", "length", "tokens", "weights")  # for what was read


@dataclass
class Run:
    """One training.

    Attributes:
        out: the file or folder to write.
        text: the text to learn from.
        seed: for everything that is drawn.
        settings: all that the result depends on; steps with others are not continued.
        model, tokenizer: None until loaded.
    """

    out: Path
    text: Path
    seed: int
    settings: dict[str, object]
    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    state: Path = field(init=False)

    def __post_init__(self) -> None:
        content = hashlib.sha256(read_text(self.text).encode()).hexdigest()[:16]
        self.settings = {**self.settings, "text": content, "seed": self.seed}
        self.state = self.out.with_name(self.out.name + ".state")

    @property
    def decoder(self) -> PreTrainedModel:
        return text_decoder(unwrapped(self.model))

    @property
    def config(self) -> PreTrainedConfig:
        """The text decoder's."""
        return self.decoder.config

    def warn_beyond(self, tokens: int, option: str) -> None:
        """Warn if a model is to read more tokens at once than it was made for: all that is learned would be noise."""
        most = getattr(self.config, "max_position_embeddings", None)
        # The limit may be that before stretching.
        is_stretched = "'factor'" in repr(getattr(self.config, "rope_parameters", None))
        if isinstance(most, int) and tokens > most and not is_stretched:
            print(
                f"warning: the model was made for {most} tokens and will read {tokens} at once: a smaller {option}= is "
                "needed to learn anything of use",
                file=sys.stderr,
            )

    def check_state(self) -> None:
        """Raise KVCompressError if the state that is there belongs to another training, or is none.

        Steps belong to all settings, what was read only to those in READING; a state with neither to anybody."""
        if not self.state.exists():
            return
        shown, held = str(self.state), set()
        if self.state.is_dir():
            held = {file.name for file in self.state.iterdir() if not file.name.startswith(UNFINISHED)}
        if SETTINGS not in held:
            if held or not self.state.is_dir():
                raise KVCompressError(f"{shown!r} is not the state of a training: remove it, or give another --out")
            return
        try:
            found = parse_json((self.state / SETTINGS).read_bytes())
        except (OSError, ValueError):
            found = None
        found, ours = found if isinstance(found, dict) else {}, parse_json(json.dumps(self.settings))
        if self.model is None:
            found.pop("weights", None)
        differ = [name for name in {**ours, **found} if ours.get(name) != found.get(name)]
        is_read_alike = not set(READING) & set(differ)
        if not differ or held == {SETTINGS} or (is_read_alike and DESCENT not in held):
            return
        rid = f"remove {DESCENT!r} in it, which keeps what was read" if is_read_alike else "remove it"
        raise KVCompressError(
            f"{shown!r} was left by a training with other settings ({', '.join(differ)}): give these again to go on, "
            f"or another --out, or {rid}"
        )

    def begin(self, needed_bytes: int = 0) -> None:
        """Create the folder of the state, once the model is loaded.

        Raises KVCompressError if the state belongs to other weights of the same name, or if the disk has no room for
        `needed_bytes`."""
        self.settings["weights"] = weights_fingerprint(self.decoder)
        self.check_state()
        write_text(self.state / SETTINGS, json.dumps(self.settings, indent=1))
        there = sum(file.stat().st_size for file in self.state.iterdir())
        free = shutil.disk_usage(self.state).free
        if needed_bytes - there > free:
            raise KVCompressError(
                f"hidden states to learn from need {needed_bytes / 2**30:.1f} GiB in {str(self.state)!r}, which "
                f"has {free / 2**30:.1f} GiB: take fewer with pieces= or tokens="
            )

    def end(self) -> None:
        """Remove the state: the training is done."""
        shutil.rmtree(self.state)

    def descend(
        self,
        layers: list[dict[str, torch.Tensor]],
        optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        loss_of: Callable[[int], torch.Tensor],
        rate: Callable[[int], float],
        steps: int,
        clip: float | None = None,
    ) -> None:
        """Take gradient steps on each layer's weights, in place, from wherever an earlier run was interrupted.

        Args:
            layers: for each layer, weights by name; they are leaves that require gradients.
            optimizer: makes the optimizer of these weights.
            loss_of: the loss of a step, counted from 0. What it draws must follow from the step alone.
            rate: the learning rate of a step.
            clip: the largest norm of all gradients together.

        Raises KVCompressError once the weights are not finite any more, when they would be saved; no step is kept then,
        so that another rate may follow.
        """
        weights = [part for layer in layers for part in layer.values()]
        descent, file = optimizer(weights), self.state / DESCENT
        with readable(file):
            first = _restore(file, weights, descent)
        saved = time.monotonic()
        with progress("training", steps, first) as bar:
            for step in range(first, steps):
                for group in descent.param_groups:
                    group["lr"] = rate(step)
                loss = loss_of(step)
                loss.backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(weights, clip)
                descent.step()
                descent.zero_grad()
                if time.monotonic() - saved >= SAVE_EVERY_S or step == steps - 1:
                    if not all(bool(part.isfinite().all()) for part in weights):
                        file.unlink(missing_ok=True)
                        raise KVCompressError(
                            f"by step {step + 1} of {steps} training has diverged: give a smaller rate="
                        )
                    bar.set_postfix(loss=f"{loss.item():.4g}")
                    state = {"step": step + 1, "weights": weights, "optimizer": descent.state_dict()}
                    write_torch(file, state)
                    saved = time.monotonic()
                bar.update()


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn errors in reading a file of the state into a KVCompressError of one line."""
    try:
        yield
    except UNREADABLE as error:
        message = one_line(error, 200)
        raise KVCompressError(
            f"{str(file)!r} cannot be read: {message}; remove it, and the same command makes it anew"
        ) from error


def _restore(file: Path, weights: list[torch.Tensor], descent: torch.optim.Optimizer) -> int:
    """Load what was saved into weights and optimizer, and return the steps that were taken."""
    if not file.exists():
        return 0
    state: Mapping = torch.load(file, map_location="cpu", weights_only=True)
    with torch.no_grad():
        for part, found in zip(weights, state["weights"], strict=True):
            part.copy_(found)
    descent.load_state_dict(state["optimizer"])
    return state["step"]


def progress(what: str, total: int, done: int = 0) -> tqdm:
    """Return a progress bar on stderr; in a log, where there is no terminal, it is shown every half minute."""
    return tqdm(desc=what, total=total, initial=done, mininterval=0.1 if sys.stderr.isatty() else 30)
