"""docs/official-tasks.md: lmms-eval's own tasks, each run through the evaluation command, alone and in a padded batch.

`python -m tests.official_tasks_page` runs what official_tasks.json does not have yet, one task after the other, and
writes the page; `python -m tests.official_tasks_page ai2d "gsm8k --num_fewshot 0"` runs these again.
tests/lmms_eval_plugins/test_official_tasks.py compares the page with the record, and with -m slow the record with runs.
"""

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvcompress.files import write_text
from tests.support.official_runs import BATCH, GENERATION, ROWS, preload, run

PAGE = Path(__file__).parents[1] / "docs" / "official-tasks.md"
RECORD = Path(__file__).with_name("official_tasks.json")
VERSIONS = ("lmms-eval", "transformers", "torch")

ANSWERS_ONLY, JAVA = " --predict_only", "answers only: its scores need Java"
JUDGED = "answers only: its scores need a judge"
TURNS = " --fewshot_as_multiturn"

# Command, a task or a group with flags -> what the table says beside it.
COMMANDS: dict[str, str] = {
    **dict.fromkeys(("ai2d", "chartqa", "countbench", "cv_bench", "docvqa_val", "gqa", "infovqa_val"), ""),
    **dict.fromkeys(("mathvision_test", "mmbench_en_dev_static", "mme", "mmstar", "ocrbench", "ok_vqa_val2014"), ""),
    **dict.fromkeys(("pope", "realworldqa", "seedbench_2_plus", "textvqa_val"), ""),
    **dict.fromkeys(("vizwiz_vqa_val", "vqav2_val"), ""),
    "mmbench_en_test": "writes a submission, no score",
    "stvqa": "writes a submission, no score",
    f"hallusion_bench_image{ANSWERS_ONLY}": JUDGED,
    f"hrbench4k{ANSWERS_ONLY}": JUDGED,
    f"mmbench_en_dev{ANSWERS_ONLY}": JUDGED,
    f"coco2017_cap_val{ANSWERS_ONLY}": JAVA,
    f"flickr30k_test{ANSWERS_ONLY}": JAVA,
    f"nocaps_val{ANSWERS_ONLY}": JAVA,
    f"refcoco_bbox_val{ANSWERS_ONLY}": JAVA,
    "microvqa": "",
    "mmmu_val": "images within the text",
    "mmmu_pro_standard": "",
    "mmmu_pro_vision": "",
    "muirbench": "",
    "blink": "group",
    "seedbench": "its videos are frames",
    "egoschema_subset": "",
    "mlvu_dev": "",
    "mvbench": "group",
    "nextqa_mc_test": "",
    "perceptiontest_val_mc": "",
    "videomme": "",
    f"tempcompass_multi_choice{ANSWERS_ONLY}": JUDGED,
    f"openai_math_train{ANSWERS_ONLY}": JUDGED,
    "gsm8k --num_fewshot 0": "`--num_fewshot 0`: see below",
    "mmlu_pro_law": "its own examples",
    f"mmlu_pro_law --num_fewshot 2{TURNS}": "`--fewshot_as_multiturn`",
    "scienceqa_full": "group",
    "ovo_forward": "rounds are answered one by one",
}
# What does not run, and why.
NEEDS = "its code imports `{}`, which lmms-eval {}"
FAILING: dict[str, str] = {
    "gsm8k": "its file asks for 5 examples and names none; `--num_fewshot 0` runs it",
    "ifeval": NEEDS.format("langdetect", "does not install"),
    "longvideobench_val_v": NEEDS.format("decord", "installs only with its extra `video-legacy`"),
    "mathvista_testmini_format": NEEDS.format("Levenshtein", "installs only with its extra `metrics`"),
    "charxiv_val_reasoning": "a model of OpenAI's scores it; with `--predict_only` it only writes answers",
}

INTRODUCTION = f"""\
<!-- The whole page is made by `python -m tests.official_tasks_page`; edit that file. -->
# lmms-eval's own tasks

These tasks and groups of lmms-eval run here, with its own files, prompts and scores, and batching changes nothing. Each
was run with the bundled model and {ROWS} generated questions of the right shape, so the scores mean nothing and are not
shown:

```bash
python -m lmms_eval_plugins.evaluate TASK tiny full,snapkv 0.5 --data-root data batch_size={BATCH} \\
    --gen_kwargs {GENERATION}
```

- *equal*: with `batch_size=1` and in padded batches of {BATCH}, all answers and scores are the same, for both methods;
- *answers equal*: the same for a task whose scores were not computed;
- *alone*: the task's requests are answered one by one at any batch size.
"""
OTHERS = """\
## What does not run in lmms-eval itself

| task | reason |
|---|---|
"""


def load() -> dict[str, Any]:
    """Return the record: `versions`, and under `runs` the outcome of each command."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {"versions": {}, "runs": {}}


def kind(command: str, facts: dict[str, Any]) -> str:
    """`2 images`, `text, 5 examples`: what a prompt of the task holds besides its question."""

    def counted(name: str) -> str:
        least, most = facts[f"{name}s"]
        number = str(most) if least == most else f"{least} to {most}"
        return f"{number} {name}" + ("s" if most > 1 else "")

    parts = [counted(name) for name in ("image", "video") if facts[f"{name}s"][1]] or ["text"]
    parts += [counted("round")] if facts["rounds"][1] > 1 else []
    if facts["shots"]:
        parts.append(f"{facts['shots']} examples" + (" as turns" if TURNS in command else ""))
    return ", ".join(parts)


def batches(command: str, facts: dict[str, Any]) -> str:
    if facts["batch"] == 1:
        return "alone"
    return "answers equal" if ANSWERS_ONLY in command else "equal"


def render(record: dict[str, Any]) -> str:
    """The page. Raises KeyError for a command that has not been run."""
    runs, versions = record["runs"], record["versions"]
    lines = ["| task | input | metric | batch 1 and 3 | |", "|---|---|---|---|---|"]
    for command, remark in COMMANDS.items():
        facts, task = runs[command], command.split()[0]
        if facts["tasks"] > 1:
            remark = f"{remark} of {facts['tasks']} tasks"
        metric = facts["metric"] if ANSWERS_ONLY not in command else ""
        lines.append(f"| {task} | {kind(command, facts)} | {metric} | {batches(command, facts)} | {remark} |")
    ran = ", ".join(f"{name} {versions[name]}" for name in VERSIONS)
    others = [f"| {command} | {why} |" for command, why in FAILING.items()]
    table = "\n".join(lines)
    return f"{INTRODUCTION}\n{table}\n\nRecorded with {ran}.\n\n{OTHERS}" + "\n".join(others) + "\n"


def main(commands: list[str]) -> int:
    """Run the commands, or those without a record, and write the page; 1 where one came out otherwise."""
    if unknown := set(commands) - {*COMMANDS, *FAILING}:
        print(f"not listed in {__file__}: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    record = load()
    versions = {name: importlib.metadata.version(name) for name in VERSIONS}
    if record["versions"] != versions:
        record = {"versions": versions, "runs": {}}
    preload()
    wrong = []
    for command in commands or [each for each in (*COMMANDS, *FAILING) if each not in record["runs"]]:
        with tempfile.TemporaryDirectory() as folder:
            facts = run(command, Path(folder))
        is_right = "error" in facts if command in FAILING else facts.get("equal_answers") and facts["equal_scores"]
        print(f"{command}: {'as it should be' if is_right else 'WRONG'} {facts}", flush=True)
        if not is_right:
            wrong.append(command)
            continue
        record["runs"][command] = facts
        write_text(RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")
    listed = {*COMMANDS, *FAILING}
    record["runs"] = {command: facts for command, facts in record["runs"].items() if command in listed}
    write_text(RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")
    if wrong:
        print(f"not as it should be: {', '.join(wrong)}", file=sys.stderr)
        return 1
    write_text(PAGE, render(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
