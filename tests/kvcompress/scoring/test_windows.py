import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompress.scoring.layer_view import LayerView, StoredEntries
from kvcompress.scoring.selection import top_indices
from kvcompress.scoring.windows import window_attention
from tests.support.examples import examples


@examples(60)
@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    window=st.integers(1, 12),
    groups=st.sampled_from([1, 3]),
)
def test_window_attention_is_the_tail_of_the_full_causal_attention(seed, lengths, window, groups):
    generator = torch.Generator().manual_seed(seed)
    columns, kv_heads = max(lengths), 2
    queries = torch.randn(len(lengths), kv_heads * groups, columns, 8, generator=generator)
    keys = torch.randn(len(lengths), kv_heads, columns, 8, generator=generator)
    padding = torch.tensor([[columns - length] for length in lengths])
    ours = window_attention(queries, keys, window, 0.3, padding)
    window = min(window, columns)
    for row, (pad,) in enumerate(padding.tolist()):
        for head in range(kv_heads * groups):
            logits = queries[row, head].double() @ keys[row, head // groups].double().T * 0.3
            visible = torch.ones(columns, columns, dtype=torch.bool).tril()
            visible[:, :pad] = False
            full = logits.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)
            expected = full[-window:].float()
            torch.testing.assert_close(ours[row, head // groups, head % groups], expected, atol=1e-6, rtol=0)


@examples(100)
@given(
    rows=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    levels=st.sampled_from([1, 2, 1000]),
)
def test_top_indices_are_the_best_real_columns_the_latest_among_equals(rows, seed, levels):
    lengths, budgets = [length for length, _ in rows], [min(rows_) for rows_ in rows]
    columns = max(lengths)
    scores = torch.randint(0, levels, (len(rows), 2, columns), generator=torch.Generator().manual_seed(seed)).float()
    padding = torch.tensor([[columns - length] for length in lengths])
    kept = top_indices(scores, budgets, padding)
    assert kept.shape == (len(rows), 2, max(budgets))
    for row, (length, budget) in enumerate(zip(lengths, budgets, strict=True)):
        for head in range(2):
            real = range(columns - length, columns)
            best = sorted(real, key=lambda c: (scores[row, head, c].item(), c))[-budget:]
            assert kept[row, head].tolist() == [-1] * (max(budgets) - budget) + sorted(best)


def test_pads_of_a_later_prompt_are_known_also_in_a_batch_of_one():
    queries = torch.zeros(1, 4, 6, 8)
    queries[:, :, :2] = torch.nan
    stored = StoredEntries(torch.arange(9).expand(1, 2, 9), 9, (9,))
    view = LayerView(0, 1, [9], [5], 1.0, stored=stored)
    assert view.real_queries(queries, 5).flatten().tolist() == [False, True, True, True, True]
