"""What a task's questions can show: which cells lack some, which the model answers blind, whether the full cache is
weak."""

import pandas as pd

RIGHT = 0.5  # least score of a question that counts as answered
OFTEN = 10  # questions with the same target, from which on it may be guessed
NAMED = 20  # questions named in one line


def most_questions(frame: pd.DataFrame) -> pd.Series:
    """Return for each row of `table.cell_row` the largest number of questions of a cell with its settings."""
    return frame.groupby("settings")["samples"].transform("max")


def fewer_questions(frame: pd.DataFrame) -> str:
    """Return a line that names the cells with fewer questions than others of their settings; empty if there are none.

    Args:
        frame: rows of `table.cell_row`, all of one task.
    """
    fewer = frame.assign(most=most_questions(frame)).query("samples < most")
    if fewer.empty:
        return ""
    counts = ", ".join(f"{row.series} ({row.asked}) has {row.samples} of {row.most}" for row in fewer.itertuples())
    return f"{frame['task'].iloc[0]}: scores over different questions do not compare: {counts}"


def other_machines(frame: pd.DataFrame) -> list[str]:
    """Return lines that name the devices, the numbers of processes and the versions, of each the ones that differ
    between timed cells. `frame`: as for `fewer_questions`."""
    timed = frame[frame["ttft_s"].notna()]
    versions = [each if isinstance(each, dict) else {} for each in timed["versions"]]
    every = sorted({name for each in versions for name in each})
    names = [name for name in every if len({each[name] for each in versions if name in each}) > 1]
    told = {
        "on different devices": [f"on {device}" for device in timed["device"].dropna()],
        "of different numbers of processes": [f"with {count:.0f}" for count in timed["processes"].dropna()],
        "of different versions": [
            "with " + ", ".join(f"{name} {each[name]}" for name in names if name in each)
            for each in versions
            if any(name in each for name in names)
        ],
    }
    lines = []
    for what, cells in told.items():
        if len(counts := pd.Series(cells, dtype=str).value_counts()) > 1:
            which = ", ".join(f"{count} {how}" for how, count in counts.items())
            lines.append(f"{frame['task'].iloc[0]}: times {what} do not compare: of the cells {which}")
    return lines


def other_definitions(frame: pd.DataFrame) -> str:
    """Return a line that names the cells of another definition of the task than most have; empty if there are none.
    `frame`: as for `fewer_questions`."""
    known = frame[frame["definition"] != ""]
    if known["definition"].nunique() < 2:
        return ""
    others = known[known["definition"] != known["definition"].mode()[0]]
    names = [f"{row.series} ({row.asked})" for row in others.itertuples()]
    which = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    return f"{frame['task'].iloc[0]}: its file or functions changed between the cells; not like the others: {which}"


def not_alike(frame: pd.DataFrame) -> list[str]:
    """Return a line for each reason for which the cells of a table do not compare. `frame`: as for
    `fewer_questions`."""
    return [*filter(None, [fewer_questions(frame), other_definitions(frame)]), *other_machines(frame)]


def answered_blind(group: pd.DataFrame) -> list[tuple[str, int]]:
    """Return (task, doc_id) of the questions that the blind run answers; empty without such a run.

    Args:
        group: cells of one task, model and settings, as from `load_grid`.
    """
    blind = group[group["method"] == "blind"]
    if blind.empty or blind["is_lower_better"].any():
        return []
    score = blind["questions"].iloc[0]["score"]
    return [*score[score >= RIGHT].index]


def chance(questions: pd.DataFrame) -> float:
    """Return the share of questions whose target is the commonest one, which is what guessing it scores. 0 if it is
    that of fewer than OFTEN questions, or if there is no other target."""
    counts = questions["target"].value_counts()
    return counts.iloc[0] / len(questions) if len(counts) > 1 and counts.iloc[0] >= OFTEN else 0.0


def weak_below(base: float) -> float:
    """Return the score, in [0, 1], below which the full cache is weak if `base` can be had without seeing: twice that;
    from a third on, half of the way from there to 1."""
    return min(2 * base, (1 + base) / 2)


def gate_lines(group: pd.DataFrame) -> list[str]:
    """Return the lines of `not_alike`, one that names the questions that are answered blind, and one if the full cache
    is weak.

    Args:
        group: as for `answered_blind`. Scores are compared if there is a full cache, whose own are all in [0, 1].
    """
    lines, task = not_alike(group), group["task"].iloc[0]
    full, blind = group[group["method"] == "full"], group[group["method"] == "blind"]
    if full.empty:
        return lines
    full = full.iloc[0]
    if full["is_lower_better"]:  # a large score answers nothing
        return lines
    if len(blind):
        found, asked = answered_blind(group), len(blind["questions"].iloc[0])
        leaves = full["questions"].index.get_level_values("task").nunique()
        names = [str(doc_id) if leaves == 1 else f"{leaf}/{doc_id}" for leaf, doc_id in found]
        more = f" and {len(names) - NAMED} more (kvcompress metrics --json names all)" if len(names) > NAMED else ""
        which = f": {', '.join(names[:NAMED])}{more}" if names else ""
        lines.append(f"{task}: {len(found)} of {asked} questions are answered blind{which}")
    scores = full["questions"]["score"]
    if not (len(scores) and scores.between(0, 1).all()):
        return lines
    bases = {"the commonest answer": chance(full["questions"])}
    if len(blind):
        bases["blind"] = float(blind["score"].iloc[0])
    name = max(bases, key=lambda each: bases[each])
    if full["score"] < weak_below(bases[name]):
        lines.append(
            f"{task}: the full cache is weak: it scores {100 * full['score']:.1f}, and {name} {100 * bases[name]:.1f}; "
            f"below {100 * weak_below(bases[name]):.1f}, what a method loses is hard to tell from guessing"
        )
    return lines
