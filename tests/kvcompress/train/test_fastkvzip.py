"""Fast KVzip's gates: their targets against plain attention, and what they are worth."""

import pytest
import torch

import kvcompress
from kvcompress.__main__ import main
from kvcompress.clusters.fastkvzip import FastKVzipKVCluster
from kvcompress.learned import checkpoints
from kvcompress.train import fastkvzip
from kvcompress.train.samples import REPEAT, Samples, agreement, chat_frame, plain_ids
from tests.kvcompress.train.conftest import random_text
from tests.support.learned_checkpoints import checkpoint_for

BEFORE, ASKED, AFTER = [20, 21, 22], [[30, 31], [40, 41, 42]], [50]


def test_the_targets_are_kvzips_scores_chunk_by_chunk(run, monkeypatch):
    monkeypatch.setattr(fastkvzip, "CHUNK", 12)
    ids = torch.randint(8, 120, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    found = fastkvzip.kvzip(run.decoder, BEFORE, ASKED, AFTER, ids)
    assert found.scores.shape == (3, 2, 30)
    run.model.set_attn_implementation("eager")
    context = [*BEFORE, *ids]
    entering = [
        layer.input_layernorm(states[0])
        for layer, states in zip(
            run.decoder.layers,
            run.model(torch.tensor([context]), output_hidden_states=True).hidden_states[:-1],
            strict=True,
        )
    ]
    torch.testing.assert_close(found.hidden, torch.stack(entering)[:, 3:], atol=1e-5, rtol=0)
    for start, request in ((0, ASKED[0]), (12, ASKED[1] + ids[4:12]), (24, ASKED[1] + ids[16:24])):
        chunk = ids[start : start + 12]
        fed = [*context, *request, *AFTER, *chunk]
        attentions = run.model(torch.tensor([fed]), output_attentions=True).attentions
        place = [*range(3), *range(3 + start, 3 + start + len(chunk)), *range(len(context), len(fed))]
        for index, weights in enumerate(attentions):
            among = weights[0, :, len(context) :, place]
            among = among / among.sum(-1, keepdim=True)
            expected = among[..., 3 : 3 + len(chunk)].amax(1).unflatten(0, (2, 2)).amax(1)
            torch.testing.assert_close(
                found.scores[index, :, start : start + len(chunk)], expected, atol=1e-5, rtol=1e-4
            )


def test_trained_gates_rank_the_entries_of_another_text_as_kvzip_does(run, tiny, text, tmp_path, capsys):
    out = tmp_path / "gates.pt"
    argv = ["train", "fastkvzip", tiny, "pieces=6", "length=250", "tokens=150", "size=8", "sinks=4"]
    assert main([*argv, "steps=60", "batch=128", "--text", str(text), "--out", str(out)]) == 0
    assert "gates from 891 tokens; rank correlation with KVzip on 9 others: 0." in capsys.readouterr().out
    before, after = chat_frame(run.tokenizer)
    asked = [plain_ids(run.tokenizer, text) for text in (REPEAT, fastkvzip.REPEAT_FROM)]
    before += plain_ids(run.tokenizer, fastkvzip.TASK)
    other = fastkvzip.kvzip(run.decoder, before, asked, after, plain_ids(run.tokenizer, random_text(40, seed=9)))
    trained = checkpoints.fastkvzip(str(out))
    drawn = checkpoints.fastkvzip(checkpoint_for("fastkvzip", run.model))
    right, untrained = (agreement(FastKVzipKVCluster(), each.layers, other) for each in (trained, drawn))
    assert right > 0.5 > 0.3 > untrained, (right, untrained)
    ids = torch.tensor([plain_ids(run.tokenizer, random_text(20, seed=3))])
    with kvcompress.compress(run.model, "fastkvzip", 0.3, checkpoint=str(out)) as session:
        run.model.generate(ids, max_new_tokens=2)
    kept = [len(head) for layer in range(3) for head in session.cache.kept_indices(layer)[0]]
    assert sum(kept) == pytest.approx(6 * (0.3 * ids.shape[1] + 1), abs=4)


def test_the_rate_warms_up_and_is_halved_twice(run, monkeypatch):
    rates = []
    monkeypatch.setattr(
        run, "descend", lambda layers, optimizer, loss_of, rate, steps: rates.extend(map(rate, range(steps)))
    )
    samples = Samples(torch.zeros(1, 10, 64), torch.zeros(1, 2, 10))
    fastkvzip.fit(run, fastkvzip.Options(steps=1000, rate=0.2), samples, torch.arange(10))
    assert [rates[step] for step in (0, 5, 10, 499, 500, 749, 750, 999)] == [0, 0.01, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05]
