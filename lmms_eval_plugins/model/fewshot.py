"""Few-shot examples, drawn separately for each question; with `--fewshot_as_multiturn` they are turns of a chat."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmms_eval import utils

if TYPE_CHECKING:
    from lmms_eval.api.task import ConfigurableMessagesTask

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class FewShot:
    """How few-shot examples are drawn and shown.

    Attributes:
        seed: seed of the draws.
        as_turns: show each example as a user's question, with its images, and an assistant's answer. Otherwise
            lmms-eval writes the examples into the question's text, without their images.
    """

    seed: int = 1234
    as_turns: bool = False

    def messages(self, doc_to_messages: Callable[..., Messages], doc: dict[str, Any], doc_id: int) -> Messages:
        """Return a question's messages, including its examples. `doc_to_messages`: lmms-eval's method of the task."""
        task = getattr(doc_to_messages, "__self__", None)
        sampler = getattr(task, "sampler", None)
        if sampler is None or not task.config.num_fewshot:
            return doc_to_messages(doc)
        # lmms-eval draws from one sequence: the examples would depend on the order of the questions.
        sampler.rnd = random.Random(f"{self.seed} {doc_id}")
        return as_turns(task, doc) if self.as_turns else doc_to_messages(doc)


def as_turns(task: "ConfigurableMessagesTask", doc: dict[str, Any]) -> Messages:
    """Return the examples and the question as a chat; the task's description precedes the first example."""
    config, sampler, number = task.config, task.sampler, task.config.num_fewshot
    drawn = sampler.sample(min(number + 1, len(sampler.docs)))  # one extra: the draw may contain the question itself
    examples = [example for example in drawn if example != doc][:number]
    messages: Messages = []
    for example in examples:
        answer = {"type": "text", "text": _answer(task, example)}
        messages += [*_question(task, example), {"role": "assistant", "content": [answer]}]
    messages += _question(task, doc)
    if config.description:
        description = {"type": "text", "text": utils.apply_template(config.description, doc)}
        first = messages[0]
        messages[0] = {**first, "content": [description, *first["content"]]}
    return messages


def _question(task: "ConfigurableMessagesTask", doc: dict[str, Any]) -> Messages:
    if callable(task.config.doc_to_messages):
        return task.doc_to_messages(doc)
    visuals = task.doc_to_visual(doc) if task.config.doc_to_visual is not None else []
    return task._build_user_turn(visuals or [], str(task.doc_to_text(doc)))


def _answer(task: "ConfigurableMessagesTask", doc: dict[str, Any]) -> str:
    """Return the first correct answer; for multiple choice, its text."""
    target = task.doc_to_target(doc)
    if isinstance(target, list | tuple):
        target = target[0]
    if isinstance(target, int) and task.config.doc_to_choice is not None:
        target = task.doc_to_choice(doc)[target]
    return str(target)
