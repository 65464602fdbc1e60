"""Which blocks of a prompt leave, and which methods can say so."""

import pytest
import torch

from kvcompress import KVCompressError
from kvcompress.engines.blocks import BlockEvictor, carried, obstacle_of
from kvcompress.methods import make_method

CARRIED = {"cur", "keydiff", "knorm", "lagkv", "q-filters", "recent", "streamingllm", "vnorm"}


def states(tokens: int, layers: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(2, tokens, 8, generator=draw) for _ in "kv") for _ in range(layers)]


@pytest.mark.parametrize(
    ("tokens", "ratio", "leave"), [(70, 0.5, 4), (64, 0.5, 4), (70, 0.9, 0), (9, 0.1, 1), (7, 0.1, 0), (80, 0.1, 9)]
)
def test_at_least_what_is_asked_stays_and_the_last_part_of_a_block(tokens, ratio, leave):
    evicted = BlockEvictor.of("knorm", ratio).evicted(states(tokens), 3, tokens, 8)
    assert evicted == sorted(set(evicted))
    assert len(evicted) == leave
    assert tokens - 8 * leave >= ratio * tokens
    assert all(place < tokens // 8 for place in evicted)


def test_streamingllm_keeps_the_block_of_the_sinks_and_the_last_ones():
    assert BlockEvictor.of("streamingllm", 0.5).evicted(states(64), 3, 64, 8) == [1, 2, 3, 4]
    assert BlockEvictor.of("recent", 0.5).evicted(states(64), 3, 64, 8) == [0, 1, 2, 3]


def test_a_block_is_worth_its_best_token_in_the_mean_of_layers_and_heads():
    layers = [(torch.ones(2, 32, 8), torch.ones(2, 32, 8)) for _ in range(2)]
    for place, (keys, _) in enumerate(layers):
        keys *= 1 + torch.arange(32)[:, None] / 100  # later keys are longer
        keys[:, 17] = 0.1  # a sink in the third block
        keys[place, 30] = 0.01  # of one head of each layer only
    assert BlockEvictor.of("knorm", 0.5).evicted(layers, 2, 32, 8) == [1, 3]


def test_the_methods_that_need_only_keys_and_values_are_carried():
    assert set(carried()) >= CARRIED


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("snapkv", "it reads queries"),
        ("h2o", "it sums over queries"),
        ("simlayerkv", "its layers or heads keep different tokens"),
        ("leverage", "it reads keys before their rotation"),
        ("infinipot-v", "it reads where pictures and videos are"),
        ("kvzap", "it reads hidden states"),
        ("random", "its choice depends on more"),
    ],
)
def test_another_method_is_an_error_that_says_what_it_needs(method, why):
    assert why in obstacle_of(make_method(method))


def test_a_method_that_drops_tokens_is_no_evictor():
    with pytest.raises(KVCompressError, match="'fastv' cannot evict in a serving engine: it drops tokens of pictures"):
        BlockEvictor.of("fastv", 0.5)
