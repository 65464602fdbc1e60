"""Compare questions per second on the demo's grid: this package against lmms-eval's own loop, one prompt at a time.

    python -m benchmarks.eval_throughput                                  # 64 questions in each of 13 cells
    python -m benchmarks.eval_throughput --clock cpu                      # on a busy machine

Both sides evaluate the same cells on the same loaded model through lmms-eval, including scores and standard errors, in
turns. `grid` is what `scripts/run_eval.sh` does: batches are prepared ahead; inputs, vision features and prefills of
the first cell are reused by the others; every answer is measured; results are written to disk. `loop` is the loop of
lmms-eval's `llava_hf` and `internvl_hf` under the same compression: each question is read, processed, generated and
decoded by itself; nothing is stored, measured or written.
"""

import argparse
import json
import os
import statistics
import tempfile
from typing import Any

from lmms_eval.api.instance import GenerationResult, Instance
from lmms_eval.api.model import lmms
from lmms_eval.evaluator import simple_evaluate
from lmms_eval.protocol import ChatMessages

import kvcompress
from kvcompress.bench.standalone import CLOCKS
from kvcompress.bench.timing import short, table
from kvcompress.flag_types import label, whole
from lmms_eval_plugins.cells.plan import Job, Plan
from lmms_eval_plugins.cells.results import SAMPLES_FILE
from lmms_eval_plugins.cells.run import evaluate_cell, load_model, measured_line, quiet
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.model.arguments import make_compression
from lmms_eval_plugins.model.generation import generation_of
from lmms_eval_plugins.model.lm import KVCompressLM

from .driver import FOLDER, Run, new_parser, start


class OneAtATime(lmms):
    """A loaded model that answers like lmms-eval's own chat wrappers: one request at a time."""

    is_simple = False

    def __init__(self, loaded: KVCompressLM):
        super().__init__()
        self.model, self.processor, self.compression = loaded.model, loaded.processor, loaded.compression
        self.device, self.max_new_tokens = loaded.device, loaded.args.max_new_tokens

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        results = []
        for request in requests:
            _, doc_to_messages, given, doc_id, task, split = request.args
            chat = ChatMessages(messages=doc_to_messages(self.task_dict[task][split][doc_id]))
            images, videos, _ = chat.extract_media()
            text = self.processor.apply_chat_template(
                chat.model_dump()["messages"], tokenize=False, add_generation_prompt=True
            )
            inputs = self.processor(images=images or None, videos=videos or None, text=text, return_tensors="pt")
            inputs = inputs.to(self.device, self.model.dtype)
            kwargs = generation_of(given, self.max_new_tokens).arguments
            cell = self.compression
            with kvcompress.compress(
                self.model, cell.method, cell.ratio, cell.budget, kwargs["max_new_tokens"], **cell.options
            ):
                output = self.model.generate(**inputs, **kwargs)
            new = output[:, inputs["input_ids"].shape[1] :]
            results.append(GenerationResult(text=self.processor.batch_decode(new, skip_special_tokens=True)[0]))
        return results

    def clean(self) -> None:
        """Keep the model, which lmms-eval would drop after the first cell: loading it again is not compared."""

    def generate_until_multi_round(self, requests: list[Instance]) -> list[list[str]]:
        raise NotImplementedError("the demo's task has one round")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError("the demo's task is generated")


def compare(words: list[str], limit: int, clock: str) -> tuple[list[dict[str, Any]], str]:
    """Evaluate every cell of a command line both ways, in turns.

    Returns a record for each cell (questions, seconds of `grid` and `loop`, identical answers), and one line that says
    what was measured.
    """
    now = CLOCKS[clock]
    with tempfile.TemporaryDirectory() as folder:
        request = parse([*words, "--limit", str(limit), "--output_path", folder])
        plan = Plan.of(request)
        quiet("ERROR")
        jobs = plan.jobs()
        lm = load_model(plan.arguments)
        loop = OneAtATime(lm)

        def by_grid(job: Job) -> list[str]:
            evaluate_cell(lm, job)
            lines = (job.folder / SAMPLES_FILE).read_text(encoding="utf-8").splitlines()
            return [json.loads(line)["filtered_resps"][0] for line in lines]

        def by_loop(job: Job) -> list[str]:
            loop.compression = make_compression(job.cell.method, job.cell.ratio, job.cell.budget, **job.options)
            output = simple_evaluate(
                model=loop,
                tasks=[job.cell.task],
                task_manager=job.asked,
                limit=request.flags.limit,
                batch_size=1,
                verbosity="ERROR",
                cli_args=argparse.Namespace(output_path=folder, process_with_media=False, reasoning_tags=None),
            )
            samples = sorted(output["samples"][job.cell.task], key=lambda sample: sample["doc_id"])
            return [sample["filtered_resps"][0] for sample in samples]

        ways = {"grid": by_grid, "loop": by_loop}
        for way in ways.values():  # a warm-up for imports and allocations
            way(jobs[-1])
        lm.batches.begin([])
        records = []
        for number, job in enumerate(jobs):
            seconds, answers = {}, {}
            for name in list(ways)[:: 1 if number % 2 else -1]:
                start = now()
                answers[name] = ways[name](job)
                seconds[name] = now() - start
            same = sum(one == other for one, other in zip(*answers.values(), strict=True))
            records.append({"cell": job.name, "questions": job.questions, "seconds": seconds, "same answers": same})
        return records, measured_line(lm, jobs[0], len(jobs))


def speed(records: list[dict[str, Any]], way: str) -> float:
    """Return questions per second over all cells."""
    return sum(record["questions"] for record in records) / sum(record["seconds"][way] for record in records)


def report(records: list[dict[str, Any]], measured: str, clock: str) -> str:
    rows = []
    for record in records:
        of_cell = [speed([record], way) for way in ("grid", "loop")]
        same = f"{record['same answers']}/{record['questions']}"
        rows.append([record["cell"], *map(short, of_cell), f"{of_cell[0] / of_cell[1]:.2f}", same])
    whole = [speed(records, way) for way in ("grid", "loop")]
    ratios = [record["seconds"]["loop"] / record["seconds"]["grid"] for record in records]
    questions, same = (sum(record[name] for record in records) for name in ("questions", "same answers"))
    rows.append(["all", *map(short, whole), f"**{whole[0] / whole[1]:.2f}**", f"{same}/{questions}"])
    what = (
        f"Questions per second ({clock} clock) of the demo's grid: `grid`, as `scripts/run_eval.sh` evaluates it, and "
        "`loop`, one question at a time as lmms-eval's `llava_hf` and `internvl_hf` do, on the same loaded model in "
        f"turns. Median ratio of the cells {statistics.median(ratios):.2f}."
    )
    return f"{what}\n\n{table(['cell', 'grid', 'loop', 'ratio', 'same answers'], rows)}\n{measured}"


def main(argv: list[str]) -> None:
    parser = new_parser("eval_throughput", __doc__, "--clock", out=FOLDER / "eval_throughput")
    parser.add_argument("words", nargs="*", type=label, default=["batch_size=16"], help="key=value, as of run_eval.sh")
    parser.add_argument("--limit", type=whole(1), default=64, help="questions per cell (64)")
    run = Run(parser, argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    records, measured = compare(run.given.words, run.given.limit, run.given.clock)
    run.measure([{}], lambda: records)
    run.report("Evaluation throughput", report(records, measured, run.given.clock))


if __name__ == "__main__":
    start(main)
