"""Inspect a run's tasks before the model loads: whether their data can be read, and what their prompts look like."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompress.errors import one_line

from .data import limited, working_directory
from .errors import DamagedFile, EvaluationFailed, UsageError
from .machine import say
from .results import dumps, read_results

if TYPE_CHECKING:
    from lmms_eval.api.task import Task

    from ..model.arguments import ModelArguments

MOST_NAMED = 3  # unreadable questions that an error lists


def set_examples(task: "Task", flags: argparse.Namespace) -> None:
    """Set the number of few-shot examples that the command line asks for, as lmms-eval does when it runs.

    Raises UsageError if lmms-eval would silently show none, EvaluationFailed if the task has none to show.
    """
    name, config, asked = task.config.task, task.config, flags.num_fewshot
    if asked:
        if config.num_fewshot == 0:
            raise UsageError(f"--num_fewshot {asked}: the file of task {name!r} fixes num_fewshot: 0")
        if not hasattr(task, "sampler"):
            raise UsageError(f"--num_fewshot {asked}: the file of task {name!r} names no examples (fewshot_config)")
        if not flags.fewshot_as_multiturn and (config.doc_to_visual is not None or callable(config.doc_to_messages)):
            raise UsageError(
                f"--num_fewshot {asked}: the prompt of task {name!r} has no place for examples; "
                "--fewshot_as_multiturn puts them before it, as turns of a chat"
            )
    if asked is not None and config.num_fewshot != 0:
        task.set_config("num_fewshot", asked)
    if task.config.num_fewshot and not hasattr(task, "sampler"):
        raise EvaluationFailed(
            f"the file of task {name!r} asks for {task.config.num_fewshot} examples and names none (fewshot_config), "
            "so lmms-eval has none to show; --num_fewshot 0 asks for none"
        )
    if flags.fewshot_as_multiturn and not (task.config.num_fewshot and hasattr(task, "sampler")):
        raise UsageError(
            f"--fewshot_as_multiturn: task {name!r} has no examples to show; --num_fewshot N asks for some"
        )


def messages_of(task: "Task", doc_id: int, doc: dict[str, Any], flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a question's messages as the model will receive them."""
    from ..model.fewshot import FewShot

    return FewShot(flags.seed[3], flags.fewshot_as_multiturn).messages(task.doc_to_messages, doc, doc_id)


def check_integrity(
    tasks: list["Task"], flags: argparse.Namespace, data_root: Path | None, most: int | None = None
) -> None:
    """Read every question of the run with its images, videos and target; `most`: only this many, without printing.

    Raises DamagedFile that names the first unreadable questions and why they cannot be read.
    """
    from lmms_eval.protocol import ChatMessages

    from ..model.prompts import read_messages

    for task in tasks:
        docs, counted, broken = task.eval_docs, {"image": 0, "video": 0}, []
        number = min(limited(len(docs), flags.limit, flags.offset), most or len(docs))
        for doc_id in range(flags.offset, flags.offset + number):
            try:
                with working_directory(data_root):
                    messages = ChatMessages(messages=messages_of(task, doc_id, doc := docs[doc_id], flags))
                    prompt = read_messages(messages, max_frames_num=1)
                    task.doc_to_target(doc)
            except Exception as error:  # a task's own code may raise anything
                broken.append(f"question {doc_id}: {type(error).__name__}: {one_line(error, 150)}")
            else:
                counted["image"] += len(prompt.images)
                counted["video"] += len(prompt.videos)
        if broken:
            more = f"; and {len(broken) - MOST_NAMED} more" if len(broken) > MOST_NAMED else ""
            raise DamagedFile(
                f"task {task.config.task!r}: {len(broken)} of {number} questions cannot be read: "
                f"{'; '.join(broken[:MOST_NAMED])}{more}"
            )
        if most is not None:
            continue
        media = ", ".join(f"{count} {kind}s" for kind, count in counted.items() if count) or "no images"
        say(f"checked {task.config.task}: {number} questions with {media} can be read")


def write_out(
    tasks: list["Task"], flags: argparse.Namespace, data_root: Path | None, arguments: "ModelArguments"
) -> None:
    """Print each task's first prompt as the model will read it, its number of tokens, and the target."""
    from lmms_eval.protocol import ChatMessages

    from kvcompress.scoring.vision import vision_token_mask

    from ..model.loading import load_processor
    from ..model.prompts import ChatProcessor

    config, processor = load_processor(arguments)
    chat = ChatProcessor(arguments, processor)
    for task in tasks:
        doc_id = flags.offset
        doc = task.eval_docs[doc_id]
        with working_directory(data_root):
            prompt = chat.read(ChatMessages(messages=messages_of(task, doc_id, doc, flags)), task.config.task)
            inputs = chat.inputs([prompt])
        tokens = inputs["input_ids"].shape[1]
        vision = int(vision_token_mask(config, inputs["input_ids"]).sum())
        say(
            f"--- {task.config.task}, question {doc_id}: "
            f"{tokens} tokens: {tokens - vision} text, {vision} vision\n"
            f"{chat.text(prompt)}\n--- target: {_shown(task.doc_to_target(doc))}\n---"
        )


def show_config(cell: Path) -> None:
    """Print the full configuration that lmms-eval used for a complete cell's task, or each task of its group."""
    say(json.dumps(read_results(cell).get("configs"), indent=2, ensure_ascii=False))


def _shown(target: Any) -> str:
    return target if isinstance(target, str) else dumps(target)
