"""A radix tree of prompt prefixes: each node holds successive tokens of one or more prompts and their computed
states."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

# Tensors (..., tokens, size): all of a node's have the same tokens on their last axis but one.
Columns = list[torch.Tensor]
SLACK = 1 / 32  # how much more memory than its tokens need a node may hold, so that fewer tensors are copied


@dataclass(eq=False)
class Node:
    """Successive tokens.

    Attributes:
        given: what identifies the tokens, each (tokens, size): ids or embeddings, positions and the like.
        computed: their queries, keys and values in each layer, (heads, tokens, head_dim).
        above: the node of the tokens before, a weak reference, so that a tree is freed as soon as nobody holds it; None
            for a root.
        used: when a prompt last passed through the node.
    """

    given: Columns
    computed: Columns
    above: "weakref.ref[Node] | None" = None
    children: "dict[bytes, Node]" = field(default_factory=dict)  # by their first token
    used: int = 0

    @property
    def parent(self) -> "Node | None":
        return None if self.above is None else self.above()

    @property
    def tokens(self) -> int:
        return self.given[0].shape[-2] if self.given else 0

    @property
    def nbytes(self) -> int:
        return sum(part.untyped_storage().nbytes() for part in [*self.given, *self.computed])


@dataclass(frozen=True)
class Path:
    """A prefix that a prompt shares with others.

    Attributes:
        nodes: the nodes of its tokens, in order, after a root without tokens.
        of_last: how many tokens of the last node belong to it.
        held: `Node.computed` of the nodes when they were found, since other prompts may split them.
    """

    nodes: tuple[Node, ...]
    of_last: int
    held: tuple[Columns, ...]

    @property
    def tokens(self) -> int:
        return sum(computed[0].shape[-2] for computed in self.held[:-1]) + self.of_last

    def computed(self, part: int, tokens: int) -> torch.Tensor:
        """Return the first `tokens` of a part of `Node.computed`."""
        return torch.cat([computed[part] for computed in self.held], dim=-2)[..., :tokens, :]


class PrefixTree:
    """A radix tree of at most `room` bytes.

    Attributes:
        nbytes: bytes held.
        reused_tokens: tokens that prompts have taken from it so far.
    """

    def __init__(self, room: int, device: str | None = None):
        """`device` holds all tensors; None: the device on which they are computed."""
        self.room, self.device, self.nbytes, self.reused_tokens = room, device, 0, 0
        self._roots: dict[object, Node] = {}
        self._clock = 0

    def find(self, identity: object, given: Columns) -> Path:
        """Find the longest known prefix of a prompt. Only prompts with the same `identity` share."""
        given = self._here(given)
        node = self._roots.setdefault(identity, Node([], []))
        nodes, of_last = [node], 0
        self._clock += 1
        while given[0].shape[0] and (child := node.children.get(_first(given))) is not None:
            of_last = _equal_tokens(child.given, given)
            nodes.append(child)
            child.used = self._clock
            if of_last < child.tokens:
                break
            node, given = child, [part[of_last:] for part in given]
        return Path(tuple(nodes), of_last, tuple(node.computed for node in nodes[1:]))

    def add(self, identity: object, given: Columns, computed: Columns, first: int) -> None:
        """Add a prompt, or as many of its tokens as fit after the least recently used ones are dropped.

        Args:
            given: what identifies all of its tokens.
            computed: states of the tokens from `first` on; the needed part is copied unless it is nearly all of them.
        """
        path = self.find(identity, given)
        start, behind = path.tokens, given[0].shape[0] - path.tokens
        if start < first or not behind:
            return
        parent = path.nodes[-1]
        if path.of_last < parent.tokens:
            self._split(parent, path.of_last)
        per_token = sum(part.nbytes // part.shape[-2] for part in [*given, *computed])
        self._make_room(per_token * behind, path.nodes)
        behind = min(behind, (self.room - self.nbytes) // per_token)
        if behind <= 0:
            return
        given = self._here(_cut(given, start, start + behind))
        computed = [part[..., start - first : start - first + behind, :].detach() for part in computed]
        is_tight = self.room - self.nbytes < (1 + SLACK) * per_token * behind
        computed = self._here([_copy(part) if is_tight or not _is_most(part) else part for part in computed])
        node = Node(given, computed, weakref.ref(parent), used=self._clock)
        parent.children[_first(given)] = node
        self.nbytes += node.nbytes

    def shrink(self, room: int) -> None:
        """Set the size in bytes, and drop the least recently used nodes that no longer fit."""
        self.room = room
        self._make_room(0)

    def clear(self) -> None:
        self._roots.clear()
        self.nbytes = 0

    def _here(self, parts: Columns) -> Columns:
        return parts if self.device is None else [part.to(self.device) for part in parts]

    def _split(self, node: Node, tokens: int) -> None:
        """Split a node after its first `tokens` tokens."""
        before = node.nbytes
        given, computed = _cut(node.given, 0, tokens), _cut(node.computed, 0, tokens)  # may be out of memory: first
        rest = Node(
            _cut(node.given, tokens, None),
            _cut(node.computed, tokens, None),
            weakref.ref(node),
            node.children,
            node.used,
        )
        for child in rest.children.values():
            child.above = weakref.ref(rest)
        node.given, node.computed = given, computed
        node.children = {_first(rest.given): rest}
        self.nbytes += node.nbytes + rest.nbytes - before

    def _make_room(self, nbytes: int, spared: tuple[Node, ...] = ()) -> None:
        """Drop the least recently used nodes, except those `spared`, until there is room for `nbytes` more."""
        if self.nbytes + nbytes <= self.room:
            return
        leaves = {node for node in self._nodes() if not node.children} - set(spared)
        while leaves and self.nbytes + nbytes > self.room:
            leaf = min(leaves, key=lambda node: node.used)
            leaves.remove(leaf)
            self.nbytes -= leaf.nbytes
            del leaf.parent.children[_first(leaf.given)]
            if not leaf.parent.children and leaf.parent.parent is not None and leaf.parent not in spared:
                leaves.add(leaf.parent)

    def _nodes(self) -> Iterator[Node]:
        """Yield all nodes but the roots."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()


def _cut(parts: Columns, start: int, stop: int | None) -> Columns:
    """Copy a range of tokens: a view would keep the whole tensor alive."""
    return [_copy(part[..., start:stop, :].detach()) for part in parts]


def _copy(part: torch.Tensor) -> torch.Tensor:
    return part.clone(memory_format=torch.contiguous_format)


def _is_most(part: torch.Tensor) -> bool:
    """Whether a view holds nearly all of its memory, so that a copy would save little."""
    return part.untyped_storage().nbytes() <= (1 + SLACK) * part.nbytes


def _first(given: Columns) -> bytes:
    """Return a key that identifies the first token."""
    return torch.cat([part[0].double() for part in given]).cpu().numpy().tobytes()


def _equal_tokens(one: Columns, other: Columns) -> int:
    """Return the length of the common prefix."""
    tokens = min(one[0].shape[0], other[0].shape[0])
    same = torch.stack([(a[:tokens] == b[:tokens]).all(-1).to(one[0].device) for a, b in zip(one, other, strict=True)])
    return int(same.all(0).long().cumprod(0).sum())
