"""The two editions of the tiny model: its vocabulary, its prompt length, and its training stages.

The second is the bundled checkpoint. It begins with the first four stages of the first, and then learns to read
video frames, and finally long answers, several pictures, videos and long texts together, from short to long.

Five stages share the same short prompts; each adds help for what the earlier ones did not learn: `facts` adds probes of
the text, `steps` and `via` probes of the first of two steps, `deeper` a layer for the second step. From `in_use` on,
questions about texts are those of the bundled task: a word's number, and the content of the picture before the text.
`many` asks more questions per prompt, because the prompt dominates the cost of a training step. `throughout` probes the
first of two steps at every token of the answer, because the second token was the one that was wrong. `sign` probes the
sign's colour if a question names a text on it. In `last` the learning rate falls, and a sign's other text is asked only
without a long text: with one, accuracy had stopped at a half.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from torch.utils.data import Dataset

from lmms_eval_plugins.tiny_vlm.questions import Shown
from tiny_vlm.curriculum import STAGES, Stage
from tiny_vlm.pack import in_turn, pack
from tiny_vlm.packing import PackedBatch, Packer, Via, View
from tiny_vlm.regimes import REGIMES, WORDS, needle
from tiny_vlm.regimes.video import JITTER
from tiny_vlm.signs import FRAME_GRID, PROMPT_WORDS, draw_packed_scene, draw_scene, questions

WARM_UP = 60  # steps
LAST_LEARNING_RATE = 0.02  # as a fraction of the peak
Range = tuple[int, int]  # fewest and most


@dataclass(frozen=True)
class Part:
    """A batch of a step: as many rows of one regime and size as make up about `tokens`, but at least one.

    `ranges`: arguments of the regime's `draw`. The one in SIZES is drawn once for all rows.
    """

    regime: str
    tokens: int
    questions: int = 0  # per row at most
    ranges: dict[str, Range] = field(default_factory=dict)
    picture_share: float = 0.0  # of the batches with a text, those that also have a picture
    kinds: tuple[str, ...] = ()  # kinds of questions to ask; empty: all


@dataclass(frozen=True)
class Mixture:
    """A stage of the curriculum in which each step has a batch of every part."""

    name: str
    steps: int
    parts: tuple[Part, ...]
    view: View = "grid"  # of single pictures
    jitter_grows_until: float = 0.0  # fraction of the stage over which signs move up to JITTER pixels off the grid
    post_prompt_share: float = 0.0  # of the batches; never for questions that read every sign
    text_labels: bool = False  # whether the probes also read the text of facts, see PackedBatch
    via: Via | None = None  # what the probes read where answers of two steps begin, see Question
    via_throughout: bool = False  # read it at every token of these answers
    learning_rate: float = 1.5e-3
    tower_scale: float = 0.1  # learning rate of tower and projector, as a factor
    decay_from: float = 1.0  # fraction of the stage after which the learning rate decays
    decay_until: float = 1.0  # fraction at which it reaches its minimum; above 1 for a stage that ends early
    inserts: int | None = None  # index of a layer inserted into the language model before the stage

    @property
    def is_of_tower(self) -> bool:
        """Whether only the vision tower is trained, without the language model."""
        return not any(part.questions for part in self.parts)

    @property
    def questions(self) -> int:
        return max(part.questions for part in self.parts)

    def data(self, seed: int, packer: Packer, parts: int) -> MixtureData:
        """Return the dataset that maps a step to a batch of each part; `parts` only matters for `Stage.data`."""
        return MixtureData(self, seed, packer)


@dataclass(frozen=True)
class Edition:
    stages: tuple[Stage | Mixture, ...]
    words: tuple[str, ...]
    longest: int  # tokens of a prompt with its answer
    regimes: tuple[str, ...] = ()  # regimes that it answers besides questions about one picture


def _draw_signs(rng: Random) -> Shown:
    """Draw a picture with the questions of the first edition."""
    scene = draw_scene(rng, avoided=WORDS)
    return Shown(questions(scene.signs), [scene.pixels], [scene.labels])


def _draw_packed_picture(rng: Random) -> Shown:
    scene = draw_packed_scene(rng)
    return Shown([], [scene.pixels], [scene.labels])


def _draw_packed_frame(rng: Random, jitter: int) -> Shown:
    scene = draw_packed_scene(rng, jitter, FRAME_GRID)
    return Shown([], frames=scene.pixels[None], frame_labels=scene.labels[None], before=np.zeros(1, np.int64))


DRAWN: dict[str, Callable[..., Shown]] = {
    "signs": _draw_signs,
    "packed_picture": _draw_packed_picture,
    "packed_frame": _draw_packed_frame,
    **REGIMES,
}
SIZES = {"multi_image": "pictures", "video": "frames", "needle": "tokens"}
JITTERED = ("packed_frame", "video")


class MixtureData(Dataset):
    """Maps a step to its batches, one of each part. Each step has its own seed, as in `curriculum.StageData`."""

    def __init__(self, stage: Mixture, seed: int, packer: Packer) -> None:
        self.stage, self.seed, self.packer = stage, seed, packer

    def __len__(self) -> int:
        return self.stage.steps

    def __getitem__(self, step: int) -> list[PackedBatch]:
        grown = step / max(1, self.stage.jitter_grows_until * self.stage.steps)
        jitter = min(JITTER, int(grown * (JITTER + 1)))
        rng = Random(f"{self.seed}/{self.stage.name}/{step}")
        return [self._batch(rng, part, jitter) for part in self.stage.parts]

    def _batch(self, rng: Random, part: Part, jitter: int) -> PackedBatch:
        options: dict[str, object] = dict(part.ranges)
        if size := part.ranges.get(SIZES.get(part.regime, "")):
            options[SIZES[part.regime]] = (rng.randint(*size),) * 2
        if part.regime == "needle":
            options["picture_share"] = float(rng.random() < part.picture_share)
        if part.regime in JITTERED:
            options["jitter"] = jitter
        post_prompt = rng.random() < self.stage.post_prompt_share and part.regime != "read_all"

        def row() -> Shown:
            shown = DRAWN[part.regime](rng, **options)
            asked = [question for question in shown.questions if not part.kinds or question.kind in part.kinds]
            return replace(shown, questions=in_turn(rng, asked, part.questions))

        first = row()
        length = pack(self.packer, [first], post_prompt, self.stage.view).ids.shape[1]
        rows = [first, *(row() for _ in range(part.tokens // length - 1))]
        labelled = self.stage.text_labels and part.regime == "needle"
        return pack(
            self.packer, rows, post_prompt, self.stage.view, labelled, self.stage.via, self.stage.via_throughout
        )


AS_IN_USE = (*needle.KINDS, *needle.PICTURE_KINDS)
BOTH_TEXTS = (*AS_IN_USE, *needle.PICTURE_TEXTS)
BOTH_WAYS = (*needle.KINDS, *needle.BACKWARDS, *needle.PICTURE_KINDS, *needle.PICTURE_TEXTS)
LATER_SHARES = (1.0, 1.5, 0.75, 1.0, 0.25)  # of the tokens: text, video, several pictures, every sign, one picture


def _mixture(
    name: str,
    tokens: int,
    ranges: dict[str, dict[str, Range]],
    is_early: bool = False,
    asked: tuple[str, ...] = BOTH_WAYS,
    picture_share: float = 0.3,
    most: tuple[int, int, int, int] = (16, 10, 12, 8),
    shares: tuple[float, float, float, float, float] = LATER_SHARES,
    **options: object,
) -> Mixture:
    """Return a stage with all regimes and about `tokens` of each; later stages have more of what is learned last.

    `asked`, `picture_share`: kinds of questions and share of pictures for texts; `most`: questions per row with a text,
    a video, several pictures, one picture.
    """
    shares = (1.0, 1.0, 1.0, 1.0, 0.5) if is_early else shares
    text, video, multi_image, read_all, signs = (int(tokens * share) for share in shares)
    parts = (
        Part("needle", text, most[0], ranges["needle"], picture_share, kinds=() if is_early else asked),
        Part("video", video, most[1], ranges["video"]),
        Part("multi_image", multi_image, most[2], ranges["multi_image"]),
        Part("read_all", read_all, 1, ranges["read_all"]),
        Part("signs", signs, most[3]),
    )
    return Mixture(name, parts=parts, **options)


SHORT = {
    "needle": {"tokens": (100, 500)},
    "video": {"frames": (8, 12), "signs": (3, 4)},
    "multi_image": {"pictures": (2, 3), "signs": (2, 3)},
    "read_all": {"signs": (2, 5), "tokens": (8, 96)},
}
LONGER = {
    "needle": {"tokens": (250, 1500)},
    "video": {"frames": (8, 20), "signs": (3, 6)},
    "multi_image": {"pictures": (2, 4), "signs": (2, 4)},
    "read_all": {"signs": (3, 7), "tokens": (16, 96)},
}
OF_LONGER = {"learning_rate": 1e-3, "post_prompt_share": 0.5, "text_labels": True, "via": "via"}
FULL = {
    "needle": {"tokens": (500, 4096)},
    "video": {"frames": (8, 32), "signs": (3, 8)},
    "multi_image": {"pictures": (2, 6), "signs": (2, 4)},
    "read_all": {"signs": (4, 8), "tokens": (24, 96)},
}
MOST = (48, 28, 24, 16)
OF_FULL = {
    "learning_rate": 8e-4,
    "view": "both",
    "post_prompt_share": 0.7,
    "text_labels": True,
    "via": "via",
    "asked": BOTH_TEXTS,
    "picture_share": 0.6,
}
OF_SHORT = {"tower_scale": 0.3, "post_prompt_share": 0.3}
SECOND_STAGES = (
    *(replace(stage, avoided=WORDS) for stage in STAGES[:4]),
    Mixture(
        "frames",
        steps=2000,
        parts=(Part("packed_frame", 1800), Part("packed_picture", 1200)),
        jitter_grows_until=0.4,
        tower_scale=1.0,
        decay_from=0.6,
    ),
    _mixture("short", 2048, SHORT, True, steps=628, **OF_SHORT),
    _mixture("facts", 2048, SHORT, True, steps=789, text_labels=True, **OF_SHORT),
    _mixture("steps", 2048, SHORT, True, steps=702, text_labels=True, via="holder", **OF_SHORT),
    _mixture("via", 2048, SHORT, steps=689, text_labels=True, via="via", **OF_SHORT),
    _mixture("deeper", 2048, SHORT, steps=1500, text_labels=True, via="via", inserts=3, **OF_SHORT),
    _mixture("longer", 3072, LONGER, steps=272, **OF_LONGER),
    _mixture("in_use", 3072, LONGER, asked=BOTH_TEXTS, picture_share=0.6, steps=700, **OF_LONGER),
    _mixture("full", 4096, FULL, steps=559, decay_from=140 / 559, decay_until=1400 / 559, **OF_FULL),
    _mixture("many", 4096, FULL, most=MOST, steps=191, **OF_FULL),
    _mixture("throughout", 4096, FULL, most=MOST, via_throughout=True, steps=485, **OF_FULL),
    _mixture("sign", 4096, FULL, most=MOST, via_throughout=True, steps=270, **{**OF_FULL, "via": "sign"}),
    _mixture(
        "last",
        4096,
        FULL,
        most=MOST,
        shares=(1.0, 1.25, 0.75, 1.0, 0.5),
        via_throughout=True,
        steps=560,
        decay_from=0.1,
        **{**OF_FULL, "via": "sign", "asked": AS_IN_USE},
    ),
)
EDITIONS = {
    1: Edition(STAGES, PROMPT_WORDS, longest=2048),
    2: Edition(SECOND_STAGES, WORDS, longest=8192, regimes=tuple(REGIMES)),
}


def learning_rate(stage: Stage | Mixture, step: int) -> float:
    """Return the learning rate of a step: linear warm-up, constant, cosine to LAST_LEARNING_RATE of the peak."""
    warm_up = min(1.0, (step + 1) / WARM_UP)
    past = max(0.0, step / stage.steps - stage.decay_from) / max(stage.decay_until - stage.decay_from, 1e-9)
    cosine = LAST_LEARNING_RATE + (1 - LAST_LEARNING_RATE) * 0.5 * (1 + math.cos(math.pi * past))
    return stage.learning_rate * warm_up * cosine


def scaled(stages: tuple[Stage | Mixture, ...], scale: float) -> tuple[Stage | Mixture, ...]:
    return tuple(replace(stage, steps=max(2, round(stage.steps * scale))) for stage in stages)
