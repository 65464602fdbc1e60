"""Calibrate a method on the prompts of a task, images and all:

    python -m lmms_eval_plugins.calibrate MODEL --task TASK --method NAME --out FILE [key=value ...]

MODEL is a hub id, a local folder, or `tiny`; `key=value` are the method's options and the model's arguments
(docs/model-args.md). On a text: `python -m kvcompress calibrate`.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .cells.data import DEFAULT_DATA_ROOT, find_tasks, load_tasks, working_directory
from .cells.errors import UsageError, exit_code
from .cells.names import check_tasks, is_lm_eval

if TYPE_CHECKING:
    from lmms_eval.api.task import Task

    from .model.prompts import ChatProcessor


def parser() -> argparse.ArgumentParser:
    from kvcompress.bench.flags import Parser, label
    from kvcompress.calibration.command import add_common_flags

    this = Parser(prog="python -m lmms_eval_plugins.calibrate", description=__doc__.splitlines()[0])
    add_common_flags(this)
    this.add_argument("--task", type=label, required=True, help="of lmms-eval, or a bundled one")
    return this


def command(argv: list[str]) -> None:
    """Write the file. Raises UsageError, KVCompressError or EvaluationFailed."""
    from kvcompress.calibration.collect import calibrate, calibrated_method
    from kvcompress.calibration.command import key_values, write
    from kvcompress.files import check_output

    from .model.arguments import model_arguments, split_arguments
    from .model.loading import device_of, load
    from .model.prompts import ChatProcessor

    flags = parser().parse_intermixed_args(argv)
    own, options = split_arguments(key_values(flags.options), [flags.method], ())
    name, _ = calibrated_method(flags.method, **options)
    arguments = model_arguments(pretrained=flags.model, **own)
    check_output(flags.out.absolute().parent, flags.out.name)
    check_tasks([flags.task])
    if is_lm_eval(flags.task):
        raise UsageError(
            f"task {flags.task!r} is not lmms-eval's, nor bundled: text has python -m kvcompress calibrate"
        )
    start, root = time.perf_counter(), DEFAULT_DATA_ROOT if DEFAULT_DATA_ROOT.is_dir() else None
    tasks = load_tasks(find_tasks([flags.task], None), flags.task, root)
    model, processor = load(arguments, device_of(arguments, 1))
    chat = ChatProcessor(arguments, processor, model.dtype)
    with working_directory(root and os.path.abspath(root)):
        prompts = prompts_of(tasks, chat, flags.questions, flags.seed, model.device)
        made = calibrate(model, name, prompts, f"task: {flags.task}", flags.seed, **options)
    made = replace(made, model=replace(made.model, name=flags.model))  # as it was called, not where it lies
    write(made, flags.out.absolute(), time.perf_counter() - start)


def prompts_of(
    tasks: list["Task"], chat: "ChatProcessor", number: int, seed: int, device: Any
) -> Iterator[dict[str, Any]]:
    """Model inputs of `number` questions of the tasks, or of all where there are fewer, drawn by the seed."""
    from lmms_eval.protocol import ChatMessages

    from .model.fewshot import FewShot
    from .model.prompts import on_device

    every = [(task, doc_id) for task in tasks for doc_id in range(len(task.eval_docs))]
    few_shot = FewShot()
    for place in sorted(random.Random(seed).sample(range(len(every)), min(number, len(every)))):
        task, doc_id = every[place]
        messages = few_shot.messages(task.doc_to_messages, task.eval_docs[doc_id], doc_id)
        prompt = messages if isinstance(messages, str) else ChatMessages(messages=messages)
        yield dict(on_device(chat.inputs([chat.read(prompt, task.config.task)]), device))


def main(argv: list[str] | None = None) -> int:
    """The exit code; every error ends with one line on stderr."""
    return exit_code(command, argv, "files")


if __name__ == "__main__":
    sys.exit(main())
