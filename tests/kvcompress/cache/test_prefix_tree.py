"""A radix tree finds what prompts have in common, gives back what was computed of it, and keeps to its bytes."""

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.cache import prefix_tree
from kvcompress.cache.prefix_tree import PrefixTree
from tests.support.examples import examples
from tests.support.in_flight import OutOfMemory

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)
PER_TOKEN = 8 + 2 * 3 * 4 + 4  # bytes: its id; what is computed, of two heads and of none


def columns(tokens: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What is given of a prompt, and computed of it, which tells each beginning from every other."""
    ids = torch.tensor(tokens)[:, None]
    codes = torch.tensor([hash(tuple(tokens[: i + 1])) % 10007 for i in range(len(tokens))], dtype=torch.float32)
    return [ids], [codes[None, :, None].repeat(2, 1, 3), codes[:, None]]


def common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@examples(100)
@given(prompts=prompts)
def test_the_longest_beginning_that_came_before_is_found_with_what_was_computed_of_it(prompts):
    tree = PrefixTree(10**9)
    for i, prompt in enumerate(prompts):
        ids, computed = columns(prompt)
        path = tree.find("model", ids)
        assert path.tokens == max((common(prompt, earlier) for earlier in prompts[:i]), default=0)
        assert tree.find("another model", ids).tokens == 0
        for part, whole in enumerate(computed if path.tokens else []):
            assert torch.equal(path.computed(part, path.tokens), whole[..., : path.tokens, :])
        tree.add("model", ids, [part[..., path.tokens :, :] for part in computed], path.tokens)
        assert tree.find("model", ids).tokens == len(prompt)
    beginnings = {tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))}
    assert tree.nbytes == PER_TOKEN * len(beginnings)


@examples(100)
@given(prompts=prompts, room=st.integers(0, 12 * PER_TOKEN))
def test_it_never_holds_more_than_its_room_and_what_it_holds_is_right(prompts, room):
    tree = PrefixTree(room)
    for prompt in prompts:
        ids, computed = columns(prompt)
        tree.add("model", ids, computed, 0)
        held = list(tree._nodes())
        assert tree.nbytes == sum(node.nbytes for node in held) <= room
        storages = {part.untyped_storage() for node in held for part in [*node.given, *node.computed]}
        assert sum(storage.nbytes() for storage in storages) == tree.nbytes  # no view keeps a larger tensor alive
        path = tree.find("model", ids)
        assert path.tokens == min(len(prompt), room // PER_TOKEN)
        for part, whole in enumerate(computed if path.tokens else []):
            assert torch.equal(path.computed(part, path.tokens), whole[..., : path.tokens, :])


def test_a_prefix_that_was_found_stays_whole_when_another_prompt_splits_it():
    tree, (ids, computed) = PrefixTree(10**9), columns([0, 1, 2, 1])
    tree.add("model", ids, computed, 0)
    path = tree.find("model", ids)
    tree.add("model", *columns([0, 1, 0]), 0)
    assert path.tokens == 4
    assert torch.equal(path.computed(0, 4), computed[0])


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_split_for_which_there_is_no_memory_leaves_a_whole_tree(at, monkeypatch):
    tree, memory = PrefixTree(10**9), OutOfMemory(at)
    for prompt in ([0, 1, 2, 1], [0, 1, 2, 2]):
        tree.add("model", *columns(prompt), 0)
    with monkeypatch.context() as patch:
        patch.setattr(prefix_tree, "_cut", memory.failing(prefix_tree._cut))
        with pytest.raises(torch.OutOfMemoryError):
            tree.add("model", *columns([0, 2]), 0)
    assert tree.find("model", columns([0, 1, 2, 2])[0]).tokens == 4
    tree.shrink(0)
    assert tree.nbytes == 0


def test_what_was_used_least_recently_leaves_first():
    tree = PrefixTree(6 * PER_TOKEN)
    for prompt in ([0, 1], [1, 1], [2, 1]):
        tree.add("model", *columns(prompt), 0)
    tree.find("model", columns([0, 1])[0])
    tree.add("model", *columns([1, 2, 2]), 0)  # shares a token with the oldest: [2, 1] goes
    held = [tree.find("model", columns(prompt)[0]).tokens for prompt in ([0, 1], [1, 1], [2, 1], [1, 2, 2])]
    assert held == [2, 2, 0, 3] or held == [2, 1, 0, 3]


def memory_of(tree: PrefixTree) -> int:
    held = {part.untyped_storage() for node in tree._nodes() for part in [*node.given, *node.computed]}
    return sum(storage.nbytes() for storage in held)


@pytest.mark.parametrize(("spare", "is_copied"), [(10**6, False), (0, True)])
def test_what_is_nearly_a_whole_tensor_is_not_copied_where_there_is_room_for_all_of_it(spare, is_copied):
    one, other = ([first] * 64 for first in (1, 2))
    tree = PrefixTree((64 + 63) * PER_TOKEN + spare)
    tree.add("model", *columns([0, *one[1:]]), 0)
    ids, computed = columns([0, *other[1:]])
    tree.add("model", ids, computed, 0)
    node = tree.find("model", ids).nodes[-1]
    assert node.tokens == 63
    for part, whole in zip(node.computed, computed, strict=True):
        assert torch.equal(part, whole[..., 1:, :])
        assert (part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()) == is_copied
    assert memory_of(tree) == tree.nbytes <= tree.room
    tree.add("model", *columns([0, *other[1:32], 3]), 0)  # splits the node
    assert memory_of(tree) == tree.nbytes <= tree.room


def test_a_tree_that_nobody_holds_is_freed_at_once():
    tree = PrefixTree(10**6)
    for prompt in ([0, 1, 2], [0, 1, 3], [0, 2]):
        tree.add("model", *columns(prompt), 0)
    nodes = [weakref.ref(node) for node in tree._nodes()]
    gc.disable()
    try:
        del tree
        assert [node() for node in nodes] == [None] * 5
    finally:
        gc.enable()
