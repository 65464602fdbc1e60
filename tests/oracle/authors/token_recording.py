"""What the authors' token methods let through, written down: `fixtures/tokens/<name>.npz`.

Their code and ours are fed the same drawn states. What goes on is compared as states, not as places: the codes differ
in where they put what they merge.
"""

import ast
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from kvcompress.methods import make_method
from kvcompress.tokens.base import Attention, TokenMethod, Tokens, Tower

from . import script
from .recording import write

FIXTURES = Path(__file__).with_name("fixtures") / "tokens"
Recordings = Iterator["TokenRecording"]


@dataclass(frozen=True)
class TokenRecording:
    """What the authors' code let through of one row's drawn tokens.

    Attributes:
        label: the method, and how it was set.
        method, options: what of ours is held against it.
        drawn: arguments of the script's `draw`, which makes the states.
        budget: vision tokens asked for, as `budget=` counts them.
        states: after each step the vision tokens' states, (kept, size).
    """

    label: str
    method: str
    options: dict[str, object]
    drawn: dict[str, int]
    budget: int
    states: list[torch.Tensor] = field(repr=False)


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Numpy's generator gives the same everywhere."""
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal(shape, dtype=np.float32))


@dataclass(frozen=True)
class Prompt:
    """A row of text, vision and text tokens that pass through layers which change nothing: each attends by drawn
    weights of its own.

    Attributes:
        hidden: (1, tokens, size).
        vision: bool (1, tokens).
        weights: of each layer, those of queries and of keys (size, size).
    """

    hidden: torch.Tensor
    vision: torch.Tensor
    weights: list[tuple[torch.Tensor, torch.Tensor]]
    heads: int = 2

    @classmethod
    def draw(cls, seed: int, layers: int, before: int, images: int, behind: int, size: int = 8) -> "Prompt":
        tokens = before + images + behind
        vision = torch.zeros(1, tokens, dtype=torch.bool)
        vision[:, before : before + images] = True
        weights = [tuple(normal(seed + n, 2, size, size)) for n in range(1, layers + 1)]
        return cls(normal(seed, 1, tokens, size), vision, weights)

    def queries_and_keys(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of hidden states (1, tokens, size), (1, heads, tokens, head_dim)."""
        return tuple((hidden @ w).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in self.weights[layer])


def of_video(recording: TokenRecording, video: torch.Tensor) -> list[torch.Tensor]:
    """The states that our method keeps of a video (frames, tokens, size) before the language model."""
    frames, tokens, size = video.shape
    hidden = torch.cat([video.flatten(0, 1), torch.zeros(1, size)])[None]  # and a text
    vision = torch.arange(hidden.shape[1])[None] < hidden.shape[1] - 1
    columns = [[torch.arange(frames * tokens).view(frames, tokens)]]
    method = make_method(recording.method, **recording.options)
    seen = Tokens(vision, None, [recording.budget], hidden, frames=columns)
    chosen, hidden = method.choose(method.score(seen), seen)
    return [hidden[chosen]]


def through(recording: TokenRecording) -> list[torch.Tensor]:
    """The vision tokens' states (kept, size) of a drawn `Prompt` that our method lets through at each of its steps."""
    prompt, method = Prompt.draw(**recording.drawn), make_method(recording.method, **recording.options)
    hidden, vision, layers = prompt.hidden, prompt.vision, len(prompt.weights)
    count, states = int(vision.sum()), []
    prepared = method.prepare(Tokens(vision, None, [count], hidden))
    for layer, left in zip(method.layers(layers), method.budgets(recording.budget, count, layers), strict=True):
        queries, keys = prompt.queries_and_keys(layer - 1, hidden)
        attention = Attention(queries, keys, keys.shape[-1] ** -0.5)
        scores = method.score(Tokens(vision, None, [left], attention=attention, prepared=prepared))
        chosen, hidden = method.choose(scores, Tokens(vision, None, [left], hidden, prepared=prepared))
        stays = (chosen | ~vision)[0]
        hidden, vision = hidden[:, stays], vision[:, stays]
        prepared = None if prepared is None else prepared[:, stays]
        states.append(hidden[vision])
    return states


def chosen(recording: TokenRecording) -> list[torch.Tensor]:
    """The embeddings (kept, size) of a drawn `Prompt` that our method lets into the language model."""
    prompt, method = Prompt.draw(**recording.drawn), make_method(recording.method, **recording.options)
    tokens = Tokens(prompt.vision, None, [recording.budget], prompt.hidden)
    stays, hidden = method.choose(method.score(tokens), tokens)
    return [hidden[stays]]


@dataclass(frozen=True)
class Tile:
    """What a vision tower with a class token, which comes first, makes of an image.

    Attributes:
        states: what one of its layers attends over, (1, tokens, size).
        weights: that layer's, of queries and of keys (size, size).
        features: what the tower hands on, (1, tokens, features).
    """

    states: torch.Tensor
    weights: torch.Tensor
    features: torch.Tensor
    heads: int = 4

    @classmethod
    def draw(cls, seed: int, side: int, size: int = 32, features: int = 6) -> "Tile":
        """`side`: in patches. Few patches stand out."""
        tokens = side * side + 1
        states = normal(seed, 1, tokens, size) * (1 + normal(seed + 1, 1, tokens, 1).abs() ** 3)
        return cls(states, normal(seed + 2, 2, size, size) / size, normal(seed + 3, 1, tokens, features))

    def seen_by(self, method: TokenMethod, budget: int) -> torch.Tensor:
        """The states (kept, features) that our method lets through, with a projector that changes nothing."""
        queries, keys = ((self.states[0] @ w).unflatten(-1, (self.heads, -1)) for w in self.weights)
        received = F.pad(method.received(queries, keys, has_class=True), (0, 1), value=-torch.inf)[None]  # and a text
        keys, features = (F.pad(x, [0] * (2 * x.ndim - 1) + [1])[1:][None] for x in (keys, self.features[0]))
        tower = Tower(received, keys, features, [self.features[0, :1]], lambda states: states)
        vision = received > -torch.inf
        tokens = Tokens(vision, None, [budget], features, tower=tower)
        chosen, hidden = method.choose(method.score(tokens), tokens)
        return hidden[chosen]


def seen(recording: TokenRecording) -> list[torch.Tensor]:
    """The states of a drawn `Tile` that our method lets through."""
    method = make_method(recording.method, **recording.options)
    return [Tile.draw(**recording.drawn).seen_by(method, recording.budget)]


def share(theirs: torch.Tensor, ours: torch.Tensor, tolerance: float = 1e-4) -> float:
    """The part of the states (tokens, size) that the two have in common, of the longer of them."""
    apart = (theirs[:, None] - ours[None]).abs().amax(-1)
    both = min(int((apart.amin(1) < tolerance).sum()), int((apart.amin(0) < tolerance).sum()))
    return both / max(len(theirs), len(ours))


def released(path: Path, name: str, namespace: dict[str, object]) -> Callable:
    """The function `name` ("function" or "Class.method") of a released file, on its own: without decorators and
    annotations, with `namespace` as its globals."""
    tree = ast.parse(path.read_text())
    nodes = tree.body
    for part in name.split("."):
        node = next(node for node in nodes if getattr(node, "name", None) == part)
        nodes = node.body
    node.decorator_list, node.returns = [], None
    for argument in filter(None, [*node.args.args, *node.args.kwonlyargs, node.args.kwarg]):
        argument.annotation = None
    exec(compile(ast.Module([node], []), str(path), "exec"), namespace)
    return namespace[name.split(".")[-1]]


def save(name: str, recordings: Sequence[TokenRecording], of: dict[str, str]) -> None:
    """Write a fixture, with its `recording.source`."""
    arrays, rows = {}, []
    for number, recording in enumerate(recordings):
        row = {key: value for key, value in vars(recording).items() if key != "states"}
        rows.append({**row, "steps": len(recording.states)})
        for step, states in enumerate(recording.states):
            arrays[f"{number}/{step}"] = states.numpy()
    write(FIXTURES / f"{name}.npz", arrays, {**of, "recordings": rows})


run = partial(script.run, save=save)


def load(name: str) -> list[TokenRecording]:
    recordings = []
    with np.load(FIXTURES / f"{name}.npz") as file:
        for number, row in enumerate(json.loads(str(file["about"]))["recordings"]):
            states = [torch.from_numpy(file[f"{number}/{step}"]) for step in range(row.pop("steps"))]
            recordings.append(TokenRecording(**row, states=states))
    return recordings
