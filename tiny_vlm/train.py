"""Train the tiny vision-language model from scratch: `python -m tiny_vlm.train --out DIR`.

One run trains all stages in order: `vision` teaches the tower to read characters, `align` teaches the language model's
first layers where a character is, `questions` and `pairs` teach it to answer, `prompts` to answer prompts as they occur
in use. `editions.py` has the stages of the second edition. On Linux `MALLOC_TRIM_THRESHOLD_=1073741824
MALLOC_MMAP_THRESHOLD_=8589934592` saves a fifth of the time.

The same command resumes an interrupted run: DIR/state.pt holds everything the next step depends on. The training curve
is in DIR/log.jsonl; at the end, the model is in DIR/checkpoint and its accuracy on fresh questions in
DIR/accuracy.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlavaOnevisionForConditionalGeneration, PreTrainedTokenizerFast

from lmms_eval_plugins.tiny_vlm.accuracy import Reader, by_kind
from tiny_vlm.curriculum import Stage
from tiny_vlm.editions import EDITIONS, Mixture, learning_rate, scaled
from tiny_vlm.examples import draw_examples
from tiny_vlm.export import export
from tiny_vlm.modeling import build_model, build_tokenizer, insert_layer
from tiny_vlm.packing import (
    IGNORED,
    PackedBatch,
    Packer,
    answer_logits,
    packed_forward,
    visual_features,
)
from tiny_vlm.probes import Probes
from tiny_vlm.regimes.dataset import draw_prompts
from tiny_vlm.signs import COLOR_KIND, HEADLINE_KINDS

LOG_EVERY = 25  # steps
FRESH_QUESTIONS = 500  # asked of the finished model
FRESH_PROMPTS = 100  # per regime, one at a time


def build_optimizers(
    model: LlavaOnevisionForConditionalGeneration, probes: Probes, stage: Stage | Mixture
) -> list[torch.optim.Optimizer]:
    """Return Muon for the networks' inner matrices, and AdamW for embeddings, norms, biases and probes."""
    tower = {id(p) for m in (model.model.vision_tower, model.model.multi_modal_projector) for p in m.parameters()}
    muon, adam = defaultdict(list), defaultdict(list)
    for name, parameter in model.named_parameters():
        inner = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (muon if inner else adam)[stage.tower_scale if id(parameter) in tower else 1.0].append(parameter)
    adam[1.0] += probes.parameters()

    def groups(by_scale: dict[float, list]) -> list[dict]:
        return [{"params": parameters, "scale": scale} for scale, parameters in by_scale.items()]

    return [
        torch.optim.Muon(groups(muon), lr=stage.learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups(adam), lr=stage.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


class Trainer:
    """Trains the model through the curriculum, saving model, probes, optimizers and position so that it can resume."""

    def __init__(
        self,
        out: Path,
        stages: tuple[Stage | Mixture, ...],
        seed: int,
        device: torch.device,
        workers: int,
        tokenizer: PreTrainedTokenizerFast | None = None,
    ):
        self.out, self.stages, self.seed, self.device, self.workers = out, stages, seed, device, workers
        self.tokenizer = tokenizer or build_tokenizer()
        self.packer = Packer(self.tokenizer)
        self.model = build_model(self.tokenizer, seed).to(device)
        self.model.set_attn_implementation("packed")
        self.probes = Probes(self.model.get_input_embeddings(), self.packer).to(device)
        # On a CPU, two threads with one core each share the batches of a step, so that only the sum of their gradients
        # waits for a busy core. A stage about single pictures splits its batch in two for them.
        self.parts = 1 if device.type == "cuda" else 2
        self.pool = ThreadPoolExecutor(self.parts)
        self.stage_number, self.step, self.seconds = 0, 0, 0.0
        self._begin(stages[0])
        self.state_file = out / "state.pt"

    def _begin(self, stage: Stage | Mixture) -> None:
        """Set up a stage: its inserted layer, parameters and optimizers."""
        if stage.inserts is not None:
            insert_layer(self.model, stage.inserts)
        self.parameters = [*self.model.parameters(), *self.probes.parameters()]
        self.optimizers = build_optimizers(self.model, self.probes, stage)

    def save(self) -> None:
        state = {
            "seed": self.seed,
            "tokens": len(self.tokenizer),
            "stages": [asdict(stage) for stage in self.stages],
            "place": (self.stage_number, self.step, self.seconds),
            "model": self.model.state_dict(),
            "probes": self.probes.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        temporary = self.state_file.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, self.state_file)

    def resume(self) -> None:
        """Resume from the state in `out`. Raises ValueError if it was made with another seed or curriculum."""
        state = torch.load(self.state_file, map_location=self.device, weights_only=True)
        self.stage_number, self.step, self.seconds = state["place"]
        done = self.stage_number + 1
        stages = [asdict(stage) for stage in self.stages]
        made_with = (state["seed"], state["tokens"], state["stages"][:done])
        if made_with != (self.seed, len(self.tokenizer), stages[:done]):
            made = "seed {}, {} tokens and {}".format(*made_with)
            raise ValueError(f"{self.state_file} was made with {made}; give another --out")
        for stage in self.stages[1:done]:
            self._begin(stage)
        self.model.load_state_dict(state["model"])
        self.probes.load_state_dict(state["probes"])
        if self.stage_number < len(self.stages):
            for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(values)
        self._forget_rows_after_state()

    def run(self, deadline: float, save_every: float = 120.0) -> bool:
        """Train until `deadline` (in time.monotonic's seconds) and save; return whether training is complete."""
        saved = time.monotonic()
        while self.stage_number < len(self.stages):
            stage = self.stages[self.stage_number]
            averages = _Averages()
            began = time.monotonic()
            for batches in self._batches(stage):
                averages.add(self._train_step(stage, batches))
                self.step += 1
                now = time.monotonic()
                self.seconds += now - began
                began = now
                if self.step % LOG_EVERY == 0 or self.step == stage.steps:
                    self._log({"stage": stage.name, "step": self.step, **averages.take()})
                if now > deadline or now - saved > save_every:
                    self.save()
                    saved = now
                    if now > deadline:
                        return False
            self.stage_number, self.step = self.stage_number + 1, 0
            if self.stage_number < len(self.stages):
                self._begin(self.stages[self.stage_number])
            self.save()
        return True

    def _batches(self, stage: Stage | Mixture) -> Iterator[list[PackedBatch]]:
        data = stage.data(self.seed, self.packer, self.parts)
        loader = DataLoader(
            data,
            batch_size=None,
            sampler=range(self.step, stage.steps),
            num_workers=self.workers,
            multiprocessing_context="fork" if self.workers else None,
            prefetch_factor=4 if self.workers else None,
        )
        return iter(loader)

    def _train_step(self, stage: Stage | Mixture, batches: list[PackedBatch]) -> dict[str, float]:
        rate = learning_rate(stage, self.step)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"]
        done = list(self.pool.map(lambda batch: self._gradients(stage, batch), batches))
        # Sum in the order of the batches, not of completion, so that repeating a step gives the same weights.
        for parameter, *parts in zip(self.parameters, *(gradients for gradients, _ in done), strict=True):
            given = [part / len(batches) for part in parts if part is not None]
            parameter.grad = sum(given[1:], given[0]) if given else None
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        merged = defaultdict(list, norm=[norm.item()])
        for _, part in done:
            for name, values in part.items():
                merged[name] += values
        return merged

    def _gradients(
        self, stage: Stage | Mixture, batch: PackedBatch
    ) -> tuple[list[Tensor | None], dict[str, list[float]]]:
        """Return the gradients of one batch's loss by parameter, and metrics to log, as lists to be averaged."""
        batch = batch.to(self.device)
        hidden = None
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            if stage.is_of_tower:
                features, frame_features = visual_features(self.model, batch)
            else:
                features, frame_features, hidden = packed_forward(self.model, batch)
        loss = torch.zeros((), device=self.device)
        metrics: dict[str, list[float]] = {}
        for prefix, seen, labels in (("", features, batch.labels), ("frame_", frame_features, batch.frame_labels)):
            if seen is not None:
                reading, accuracies = self.probes.vision_loss(seen, labels)
                loss = loss + reading
                accuracies["vision_loss"] = reading.item()
                metrics |= {prefix + name: [value] for name, value in accuracies.items()}
        if hidden is not None:
            loss = 0.3 * loss
            if features is not None or batch.text_labels is not None:
                position, accuracies = self.probes.position_loss(hidden, batch)
                loss = loss + 0.5 * position
                metrics |= {name: [value] for name, value in accuracies.items()}
                metrics["position_loss"] = [position.item()]
            context, accuracies = self.probes.context_loss(hidden, batch)
            loss = loss + 0.5 * context
            metrics |= {name: [value] for name, value in accuracies.items()}
        if stage.questions:
            logits, targets = answer_logits(self.model, hidden[-1], batch)
            answer = F.cross_entropy(logits, targets)
            loss = loss + answer
            metrics["answer_loss"] = [answer.item()]
            metrics |= _question_scores(logits.argmax(-1) == targets, batch)
        return list(torch.autograd.grad(loss, self.parameters, allow_unused=True)), metrics

    def _forget_rows_after_state(self) -> None:
        """Drop the log rows of steps after the saved state, which will be repeated."""
        log = self.out / "log.jsonl"
        if not log.exists():
            return
        names = [stage.name for stage in self.stages]
        rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        kept = [row for row in rows if (names.index(row["stage"]), row["step"]) <= (self.stage_number, self.step)]
        temporary = log.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        os.replace(temporary, log)

    def _log(self, row: dict) -> None:
        row = {**row, "seconds": round(self.seconds, 1)}
        with open(self.out / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def _question_scores(right: Tensor, batch: PackedBatch) -> dict[str, list[float]]:
    """Return kind -> for each of its questions, whether all answer tokens were right, each given those before it."""
    rows, columns = (batch.targets != IGNORED).nonzero(as_tuple=True)
    wrong = {
        (row, segment)
        for row, segment, ok in zip(rows.tolist(), batch.segments[rows, columns].tolist(), right.tolist(), strict=True)
        if not ok
    }
    scores = defaultdict(list)
    for row, kinds in enumerate(batch.kinds):
        for segment, kind in enumerate(kinds, start=1):
            scores[kind].append(float((row, segment) not in wrong))
    return scores


class _Averages:
    def __init__(self) -> None:
        self.values = defaultdict(list)

    def add(self, metrics: dict[str, list[float]]) -> None:
        for name, values in metrics.items():
            self.values[name] += [value for value in values if not math.isnan(value)]

    def take(self) -> dict[str, float]:
        averages = {k: round(sum(v) / len(v), 4) for k, v in sorted(self.values.items()) if v}
        self.values.clear()
        return averages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for state, log and the finished model")
    parser.add_argument("--edition", type=int, choices=EDITIONS, default=2, help="see editions.py")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the length of all stages")
    parser.add_argument("--workers", type=int, default=1, help="processes that draw images; a GPU needs about 14")
    parser.add_argument("--nice", type=int, default=10, help="how much to lower the priority on a CPU")
    parser.add_argument("--max-minutes", type=float, default=math.inf, help="stop after this; rerun to continue")
    arguments = parser.parse_args()

    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # per part of the batch, see Trainer
        os.nice(arguments.nice)
    arguments.out.mkdir(parents=True, exist_ok=True)
    edition = EDITIONS[arguments.edition]
    tokenizer = build_tokenizer(edition.words, edition.longest)
    stages = scaled(edition.stages, arguments.scale)
    trainer = Trainer(arguments.out, stages, arguments.seed, device, arguments.workers, tokenizer)
    if trainer.state_file.exists():
        trainer.resume()
    if not trainer.run(deadline=time.monotonic() + 60 * arguments.max_minutes):
        print(f"stopped after {arguments.max_minutes} minutes; the same command continues")
        return
    export(trainer.model, trainer.tokenizer, arguments.out / "checkpoint")
    examples = draw_examples(FRESH_QUESTIONS, (*HEADLINE_KINDS, COLOR_KIND), "fresh")
    reader = Reader(arguments.out / "checkpoint", device=arguments.device)
    accuracy = {"questions": len(examples), "percent": by_kind(examples, reader.answers(examples))}
    for regime in edition.regimes:
        prompts = draw_prompts(regime, FRESH_PROMPTS, "fresh")
        accuracy[regime] = {"questions": len(prompts), "percent": by_kind(prompts, reader.answers_to(prompts))}
    (arguments.out / "accuracy.json").write_text(json.dumps(accuracy) + "\n", encoding="utf-8")
    print(json.dumps(accuracy))


if __name__ == "__main__":
    main()
