"""Evaluate one cell of a text benchmark with lm-eval, and convert its output to the form of lmms-eval's results."""

import argparse
import math
import random
import statistics
from typing import TYPE_CHECKING, Any

from .tasks import TextTask

if TYPE_CHECKING:
    from ..model.answerer import Answerer
    from ..model.arguments import ModelArguments

OTHER_LENGTH = -1  # value of RULER's metrics for questions of other lengths


def evaluate_text(lm: "Answerer", task: TextTask, flags: argparse.Namespace) -> dict[str, Any] | None:
    """Run a task with lm-eval; return its output in the form of lmms-eval's results, or None on ranks above 0.

    This is lm-eval's `simple_evaluate` without its report of the environment, which takes seconds.
    """
    import lm_eval.api.task
    import numpy as np
    import torch
    from lm_eval.evaluator import evaluate
    from tqdm import tqdm

    from ..model.prompts import text_of
    from .model import LmEvalAdapter

    lm_eval.api.task.tqdm = lambda *args, **kwargs: tqdm(*args, **{**kwargs, "disable": True})
    random.seed(flags.seed[0])
    np.random.seed(flags.seed[1])
    torch.manual_seed(flags.seed[2])
    for leaf in task.tasks.values():
        leaf.set_fewshot_seed(seed=flags.seed[3])
    output = evaluate(
        lm=LmEvalAdapter(lm),
        task_dict={"tasks": task.tasks, "groups": task.groups},
        limit=flags.limit,
        log_samples=True,
        system_instruction=text_of(lm.args.system_prompt or "") or None,
        apply_chat_template=applies_template(lm.args, flags),
        fewshot_as_multiturn=applies_template(lm.args, flags),
    )
    return None if output is None else as_of_lmms_eval(dict(output), task)


def applies_template(args: "ModelArguments", flags: argparse.Namespace) -> bool:
    """Return whether the chat template renders the prompts: only if requested, as in lm-eval."""
    return args.chat_template != "plain" and bool(flags.apply_chat_template or args.chat_template)


def as_of_lmms_eval(output: dict[str, Any], task: TextTask) -> dict[str, Any]:
    """Convert lm-eval's results to the form that reports read: one prompt per question, only real scores, and a
    standard error for each mean."""
    for name, samples in output["samples"].items():
        for sample in samples:
            sample["arguments"] = sample["arguments"][0][:1]
            length = sample.pop("doc", {}).get("max_length")
            for metric in sample.pop("metrics"):
                if length is not None and metric.isdigit() and int(metric) != length:
                    del sample[metric]
        _settle(output["results"][name], samples)
    for group in task.groups:
        scores = output["results"][group]
        for key in [key for key, value in scores.items() if value == OTHER_LENGTH]:
            del scores[key]
    if task.name not in output["results"]:  # a tag, which is not a group for lm-eval
        output["group_subtasks"] = {**output.get("group_subtasks", {}), task.name: list(task.tasks)}
    return output


def _settle(scores: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """Drop metrics that no question has, and fill in the standard errors of means that lm-eval does not compute."""
    for key in list(scores):
        metric, comma, answer_filter = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        values = [each[metric] for each in samples if each["filter"] == answer_filter and metric in each]
        error = f"{metric}_stderr,{answer_filter}"
        if not values:
            scores.pop(key)
            scores.pop(error, None)
        elif scores.get(error) == "N/A" and len(values) > 1 and _is_mean(scores[key], values):
            scores[error] = statistics.stdev(values) / math.sqrt(len(values))


def _is_mean(score: Any, values: list[Any]) -> bool:
    is_numbers = all(isinstance(each, int | float) for each in [score, *values])
    return is_numbers and math.isclose(statistics.fmean(values), score, abs_tol=1e-9)
