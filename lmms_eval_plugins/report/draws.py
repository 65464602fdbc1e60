"""One row for the cells of a method that differ only in its `seed`: draws of the same choice."""

import numpy as np
import pandas as pd

SEED = "seed="
# Columns of a row that become the mean over draws; NaN if a draw has none.
MEANS = (
    "realised", "kept", "score", "relative", "loyalty", "speed_up", "ttft_s", "tpot_s", "answers_per_s", "tokens_per_s",
    "tokens_per_correct", "tokens_out", "kv_bytes", "kv_room_bytes", "peak_kv_bytes",
)  # fmt: skip


def pooled(frame: pd.DataFrame) -> pd.DataFrame:
    """Join the draws of each method, size and set of settings.

    Args:
        frame: rows of `table.cell_row`, all of one task and model; also with a column `questions`.

    Returns:
        The frame with one row for all draws: means, the fewest questions of a draw, in `stderr` the standard deviation
        of their scores, in `draws` how many there are, and the option `draws=10` in place of the seed. Rows that stand
        alone are unchanged.
    """
    plain = frame["options"].map(lambda options: tuple(each for each in options if not each.startswith(SEED)))
    keys = [frame["settings"], frame["method"], plain, frame["ratio"].astype(float), frame["budget"].astype(float)]
    groups = [draws for _, draws in frame.groupby(keys, sort=False, dropna=False)]
    if len(groups) == len(frame):
        return frame
    return pd.concat([_joined(draws) if _are_draws(draws) else draws for draws in groups]).infer_objects()


def _are_draws(frame: pd.DataFrame) -> bool:
    """Whether rows that agree but for their seeds have several: two copies of a folder are no draws."""
    return frame["options"].nunique() > 1


def explanation(frame: pd.DataFrame) -> str:
    """Explain the option `draws=N` of a `pooled` frame; empty if no row has it."""
    return "draws=N: mean of N seeds, ± their standard deviation." if (frame["draws"] > 1).any() else ""


def _joined(draws: pd.DataFrame) -> pd.DataFrame:
    first = draws.iloc[0].copy()
    for name in MEANS:
        if name in draws:
            first[name] = draws[name].astype(float).mean(skipna=False)
    first["stderr"] = draws["score"].astype(float).std(skipna=False)
    for name in ("samples", "scored"):
        first[name] = draws[name].min()
    first["draws"] = len(draws)
    first["options"] = (*(each for each in first["options"] if not each.startswith(SEED)), f"draws={len(draws)}")
    first["series"] = " ".join((first["method"], *first["options"]))
    if all(isinstance(layers, list) for layers in draws["per_layer"]):
        first["per_layer"] = np.mean([*draws["per_layer"]], axis=0).tolist()
    if "questions" in draws:
        first["questions"] = _mean_questions(draws["questions"].tolist())
    return first.to_frame().T


def _mean_questions(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Return the mean over draws of each question's numbers, with the first draw's answer."""
    every = pd.concat(frames)
    numbers = every[["score", "seconds", "tokens_out"]].astype(float)
    means = numbers.groupby(level=[0, 1]).mean().where(numbers.notna().groupby(level=[0, 1]).all())
    return every[~every.index.duplicated()].sort_index().assign(**means)
