"""`kvcompress calibrate`: measure what a calibrated method needs to know about a model, and write it to a file.

The prompts are those of a task, with images (`--task`). All other arguments are those of the core's command.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvcompress.calibration import command as core
from kvcompress.command_line import key_values, returns_exit_code
from kvcompress.files import check_output
from kvcompress.flag_types import label

from .cells.errors import UsageError
from .cells.request import BUNDLED_MODEL

if TYPE_CHECKING:
    from lmms_eval.api.task import Task

    from .model.prompts import ChatProcessor


def parser() -> argparse.ArgumentParser:
    def add(data: Any) -> None:
        data.add_argument("--task", type=label, help="a task of lmms-eval, or a bundled one; MODEL may be `tiny`")

    return core.parser(add)


@returns_exit_code("files")
def main(argv: list[str]) -> None:
    """Write the file."""
    flags = parser().parse_intermixed_args(argv)
    if flags.task is None:
        if flags.model == BUNDLED_MODEL:
            raise UsageError(f"the bundled model {BUNDLED_MODEL!r} is calibrated with --task")
        core.calibrate(flags)
        return
    from kvcompress.calibration.collect import calibrate, calibrated_method

    from .cells.data import DEFAULT_DATA_ROOT, find_tasks, load_tasks, working_directory
    from .cells.names import check_tasks, is_lm_eval
    from .model.arguments import model_arguments, split_arguments
    from .model.loading import device_of, load
    from .model.prompts import ChatProcessor

    own, options = split_arguments(key_values(flags.options, ("method",)), [flags.method], ())
    name, _ = calibrated_method(flags.method, **options)
    for argument in ("device", "dtype"):
        given = getattr(flags, argument)
        if given not in (None, "auto"):
            if argument in own:
                raise UsageError(f"give either {argument}={own[argument]} or --{argument} {given}, not both")
            own[argument] = given
    arguments = model_arguments(pretrained=flags.model, **own)
    check_output(flags.out.absolute().parent, flags.out.name)
    check_tasks([flags.task])
    if is_lm_eval(flags.task):
        raise UsageError(f"--task {flags.task!r} is neither lmms-eval's nor bundled: for text use --text")
    start, root = time.perf_counter(), DEFAULT_DATA_ROOT if DEFAULT_DATA_ROOT.is_dir() else None
    tasks = load_tasks(find_tasks([flags.task]), flags.task, root)
    model, processor = load(arguments, device_of(arguments, 1))
    chat = ChatProcessor(arguments, processor, model.dtype)
    with working_directory(root and os.path.abspath(root)):
        prompts = prompts_of(tasks, chat, flags.questions, flags.seed, model.device)
        made = calibrate(model, name, prompts, f"task: {flags.task}", flags.seed, **options)
    made = replace(made, model=replace(made.model, name=flags.model))  # the name given, not its path
    core.write(made, flags.out.absolute(), time.perf_counter() - start)


def prompts_of(
    tasks: list["Task"], chat: "ChatProcessor", number: int, seed: int, device: Any
) -> Iterator[dict[str, Any]]:
    """Yield the model inputs of `number` questions of the tasks drawn with the seed, or of all if there are fewer."""
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


if __name__ == "__main__":
    sys.exit(main())
