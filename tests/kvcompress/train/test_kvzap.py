"""KVzap's surrogates: their targets against plain loops, their fits, and what they are worth."""

import pytest
import torch
from sklearn.linear_model import Ridge

import kvcompress
from kvcompress.__main__ import main
from kvcompress.clusters.kvzap import KVzapKVCluster
from kvcompress.learned import checkpoints
from kvcompress.train import kvzap
from kvcompress.train.samples import REPEAT, Samples, agreement, chat_frame, plain_ids
from tests.kvcompress.train.conftest import random_text
from tests.support.learned_checkpoints import write_kvzap

SMALL = ["pieces=8", "length=150", "tokens=90"]


def samples_of(run, text: str) -> Samples:
    before, after = chat_frame(run.tokenizer)
    between = plain_ids(run.tokenizer, REPEAT) + after
    return kvzap.kvzip_plus(run.decoder, before, between, plain_ids(run.tokenizer, text))


def test_the_targets_are_the_logarithms_of_kvzip_plus_scores(run):
    text = random_text(8, seed=5)
    found = samples_of(run, text)
    user, context, ask = (plain_ids(run.tokenizer, part) for part in ("[user] ", text, f"{REPEAT}[assistant] "))
    ids = torch.tensor([[*user, *context, *ask, *context]])
    start, tokens = len(user), len(context)
    run.model.set_attn_implementation("eager")
    seen, values = [], []
    for layer in run.decoder.layers:
        attention = layer.self_attn
        attention.register_forward_pre_hook(lambda _, args, kw: seen.append(kw["hidden_states"][0]), with_kwargs=True)
        attention.v_proj.register_forward_hook(lambda _, args, out: values.append(out[0].unflatten(-1, (2, -1))))
    attentions = run.model(input_ids=ids, output_attentions=True).attentions
    for index, weights in enumerate(attentions):
        torch.testing.assert_close(found.hidden[index], seen[index][start : start + tokens])
        projection = run.decoder.layers[index].self_attn.o_proj.weight.unflatten(1, (4, -1))
        for token in range(0, tokens, 7):
            for head in range(2):
                expected = max(
                    weights[0, query, row, start + token]
                    * (projection[:, query] @ values[index][start + token, head]).norm()
                    / seen[index][row].norm()
                    for query in (2 * head, 2 * head + 1)
                    for row in range(ids.shape[1] - tokens, ids.shape[1])
                ).log()
                torch.testing.assert_close(found.scores[index, head, token], expected, atol=1e-4, rtol=0)


def test_a_linear_surrogate_is_ridge_regression(run):
    draw = torch.Generator().manual_seed(0)
    samples = Samples(torch.randn(2, 40, 8, generator=draw), torch.randn(2, 3, 40, generator=draw))
    learned = torch.arange(0, 40, 2)
    for layer, hidden, scores in zip(
        kvzap.fit_linear(run, samples, learned), samples.hidden, samples.scores, strict=True
    ):
        expected = Ridge().fit(hidden[learned].double(), scores[:, learned].double().T)
        torch.testing.assert_close(layer["weight"].double(), torch.tensor(expected.coef_), atol=1e-6, rtol=0)
        torch.testing.assert_close(layer["bias"].double(), torch.tensor(expected.intercept_), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_trained_surrogate_ranks_the_entries_of_another_text_as_kvzip_plus_does(
    kind, run, tiny, text, tmp_path, capsys
):
    out = tmp_path / kind
    more = ["hidden=16", "batch=64", "epochs=8"] if kind == "mlp" else []
    argv = ["train", "kvzap", tiny, f"kind={kind}", *SMALL, *more, "--text", str(text), "--out", str(out)]
    assert main(argv) == 0
    assert f"{kind} from 684 tokens; rank correlation with KVzip+ on 36 others: 0." in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == [kind]  # nothing of the state is left
    trained = checkpoints.kvzap(str(out))
    assert (trained.hidden_size, trained.kv_heads, len(trained.layers)) == (64, 2, 3)
    write_kvzap(tmp_path / "drawn", 3, 64, 2, None if kind == "linear" else 16)
    drawn = checkpoints.kvzap(str(tmp_path / "drawn"))
    other = samples_of(run, random_text(40, seed=9))
    right, untrained = (agreement(KVzapKVCluster(), each.layers, other) for each in (trained, drawn))
    assert right > 0.5 > 0.3 > untrained, (right, untrained)
    ids = torch.tensor([plain_ids(run.tokenizer, random_text(20, seed=3))])
    with kvcompress.compress(run.model, "kvzap", 0.3, checkpoint=str(out), recent=4) as session:
        run.model.generate(ids, max_new_tokens=2)
    assert session.cache.realised_ratios()[0][0] == pytest.approx(0.3, abs=0.02)
