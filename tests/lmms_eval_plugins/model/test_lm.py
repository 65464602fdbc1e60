"""The lmms-eval model, over tiny checkpoints of several families and lmms-eval's own requests."""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

import kvcompress
from lmms_eval_plugins.model.answering import Answering
from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT
from lmms_eval_plugins.model.lm import KVCompressLM
from tests.support.checkpoints import image, load_lm, messages, requests, texts
from tests.support.docs import DOCS, python_blocks

VLM_FAMILIES = ("llava-onevision", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "internvl")


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load_lm(checkpoint("llava-onevision"))


@pytest.fixture
def lm(loaded):
    """A LLaVA-OneVision that several tests share, with the full cache and no rows."""
    loaded.set_cell()
    loaded.reset_rows()
    return loaded


@pytest.mark.slow
def test_several_settings_run_on_one_loaded_model_as_the_page_says(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # lmms-eval writes submissions there
    code = next(block for block in python_blocks(DOCS / "model-args.md") if "lm.set_cell" in block)
    exec(code, {})
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{'tiny_textvqa'")]
    assert len(printed) == 2
    assert "'realised_ratio': {'mean': 0.5" in printed[0]
    assert "'realised_ratio': {'mean': 0.2" in printed[1]


# -- prompts and answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", VLM_FAMILIES)
def test_a_full_cache_answer_is_what_transformers_itself_generates(checkpoint, family):
    lm, folder = load_lm(checkpoint(family)), checkpoint(family)
    picture, question = image(5, 192, 192), "what number is on the blue sign?"
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
    )
    new = model.generate(**inputs, do_sample=False, max_new_tokens=8)[:, inputs["input_ids"].shape[1] :]
    expected = processor.batch_decode(new, skip_special_tokens=True)
    (result,) = lm.generate_until(requests(lm, [{"text": question, "images": [picture]}]))
    assert [result.text] == expected
    assert len(result.text) > 3
    assert result.token_counts.input_tokens == inputs["input_ids"].shape[1]
    assert result.token_counts.output_tokens == new.shape[1]


def test_text_only_model(checkpoint):
    lm = load_lm(checkpoint("llama"), method="streamingllm", ratio=0.5, batch_size=2)
    results = lm.generate_until(requests(lm, [{"text": "a much longer question"}, {"text": "short"}]))
    assert [row["vision_tokens"] for row in lm.rows] == [0, 0]
    assert {row["doc_id"]: row["tokens_in"] for row in lm.rows} == {0: 41, 1: 24}  # "[user] ", text, "[assistant] "
    assert all(result.text for result in results)


def test_results_keep_the_order_of_the_requests_over_batches_and_generation_arguments(checkpoint):
    lm, batched = load_lm(checkpoint("qwen2-vl")), load_lm(checkpoint("qwen2-vl"), batch_size=2)
    docs = [{"text": "what word is on the red sign?" * n, "images": [image(n, 192, 192)]} for n in (1, 3, 2)]
    expected = [lm.generate_until(requests(lm, [doc], max_new_tokens=n))[0].text for doc in docs for n in (1, 6)]
    assert len(set(expected)) > 2
    mixed = [requests(batched, docs, max_new_tokens=n)[doc] for doc in range(3) for n in (1, 6)]
    assert texts(batched.generate_until(mixed)) == expected


def test_beam_search_rows_are_those_of_the_documents(checkpoint):
    docs = [{"text": "what word is on the red sign?", "images": [image(n, 128, 128)]} for n in (1, 2)]
    docs += [{"text": "hello"}]
    cell = {"method": "streamingllm", "budget": 40}
    lm, batched = (load_lm(checkpoint("qwen2-vl"), batch_size=size, **cell) for size in (1, 3))
    expected = texts(lm.generate_until(requests(lm, docs, num_beams=2, max_new_tokens=3)))
    assert texts(batched.generate_until(requests(batched, docs, num_beams=2, max_new_tokens=3))) == expected
    for row in batched.rows:
        assert row["realised_ratio"][0] == pytest.approx(min(40 / row["tokens_in"], 1))


def test_a_tasks_own_stop_string_cuts_the_answer_and_lmms_evals_default_does_not(checkpoint):
    lm = load_lm(checkpoint("llama"), max_new_tokens=20)
    docs = [{"text": "hello"}]
    (whole,) = texts(lm.generate_until(requests(lm, docs)))
    stop = whole[4:6]
    assert texts(lm.generate_until(requests(lm, docs, until=[stop]))) == [whole.split(stop)[0]]


def test_max_new_tokens_is_a_default_that_a_task_overrides(checkpoint):
    lm = load_lm(checkpoint("llama"), max_new_tokens=5)
    counts = [
        lm.generate_until(requests(lm, [{"text": "hello"}], **task))[0].token_counts.output_tokens
        for task in ({}, {"max_new_tokens": 9})
    ]
    assert counts == [5, 9]


# -- compression and measurement --------------------------------------------------------------------------------------


def test_every_cell_runs_on_the_one_loaded_model_and_its_rows_say_what_was_kept(lm):
    docs = [{"text": "what word is on the red sign?", "images": [image(0, 192, 192)]}]
    model, answers = lm.model, {}
    for cell in ({}, {"method": "snapkv", "ratio": 0.5}, {"method": "streamingllm", "budget": 20}):
        lm.set_cell(**cell)
        lm.reset_rows()
        answers[str(cell)] = texts(lm.generate_until(requests(lm, docs)))
        (row,) = lm.rows
        expected = {"snapkv": 0.5, "streamingllm": 20 / row["tokens_in"]}.get(cell.get("method"), 1.0)
        assert len(row["realised_ratio"]) == lm.model.config.text_config.num_hidden_layers
        assert row["realised_ratio"] == pytest.approx([expected] * 5, abs=0.002)
        text = lm.model.config.text_config
        per_token = 2 * 4 * text.num_hidden_layers * text.num_key_value_heads * (text.hidden_size // 4)
        assert row["kv_bytes_prompt"] == pytest.approx((expected * row["tokens_in"] + 8) * per_token, rel=0.05)
        assert row["kv_bytes_end"] >= row["kv_bytes_prompt"]
    assert lm.model is model
    assert len({tuple(answer) for answer in answers.values()}) > 1  # the compressed cache is what is decoded from


def test_a_video_in_chunks_is_the_one_in_one_piece_and_keeps_its_budget(lm, video):
    docs = [{"text": "what happens?", "videos": [video]}]
    decoder, passes, answers = kvcompress.hooks.model.text_decoder(lm.model), [], []
    handle = decoder.register_forward_hook(lambda module, args, output: passes.append(output[0].shape[1]))
    for cell in ({}, {"method": "snapkv", "ratio": 1.0}, {"method": "infinipot-v", "budget": 40}):
        lm.set_cell(**cell, **({"prefill_chunk": 64} if cell else {}))
        lm.reset_rows()
        passes.clear()
        answers.append(texts(lm.generate_until(requests(lm, docs))))
        (row,) = lm.rows
        assert max(passes) == (64 if cell else row["tokens_in"])
    handle.remove()
    assert answers[0] == answers[1] != answers[2]
    assert row["tokens_in"] > 3 * 64
    assert row["realised_ratio"] == pytest.approx([40 / row["tokens_in"]] * 5)


def test_rows_hold_every_field_and_go_to_json(lm):
    lm.generate_until(requests(lm, [{"text": "what?", "images": [image(0)]}], task="t"))
    (row,) = json.loads(json.dumps(lm.rows))
    assert (row["task"], row["doc_id"], row["split"], row["batch_size"]) == ("t", 0, "test", 1)
    assert row["ttft_s"] > 0
    assert row["peak_memory_bytes"] > 0
    assert row["tokens_in"] > row["vision_tokens"] > 0


def test_each_cell_is_warmed_up_once_and_the_warm_up_is_not_counted(lm, monkeypatch):
    calls = []
    measured = kvcompress.measure.generate

    def generate(model, session, inputs, **kwargs):
        calls.append(kwargs["max_new_tokens"])
        return measured(model, session, inputs, **kwargs)

    monkeypatch.setattr(kvcompress.measure, "generate", generate)
    docs = [{"text": "hello"}, {"text": "you"}]
    lm.generate_until(requests(lm, docs))
    lm.generate_until(requests(lm, docs))
    assert len(calls) == 1 + 4
    assert calls[0] < calls[1]
    assert len(lm.rows) == 4
    lm.set_cell("random", 0.5)
    lm.generate_until(requests(lm, docs))
    assert len(calls) == 5 + 1 + 2


def test_padding_requests_are_answered_but_not_counted(lm):
    results = lm.generate_until(requests(lm, [{"text": "one"}, {"text": "two"}, {"text": "three"}], padding=1))
    assert len(results) == 3
    assert sorted(row["doc_id"] for row in lm.rows) == [0, 1]


def test_an_exception_while_generating_ends_the_run(lm, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(lm.model, "generate", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        lm.generate_until(requests(lm, [{"text": "hello"}]))
    monkeypatch.undo()
    assert lm.generate_until(requests(lm, [{"text": "hello"}]))  # and leaves the model usable


def no_memory_for(lm: KVCompressLM, monkeypatch, too_much) -> list[tuple[int, str]]:
    """Make `generate` run out of memory where `too_much(batch_size, cache_implementation)`; returns all attempts."""
    attempts, generate = [], lm.answering.generate

    def limited(inputs, kwargs, *others, **named):
        attempt = (len(inputs["input_ids"]), lm.compression.options.get("cache_implementation", "dynamic"))
        attempts.append(attempt)
        if too_much(*attempt):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(inputs, kwargs, *others, **named)

    monkeypatch.setattr(lm.answering, "generate", limited)
    return attempts


@pytest.mark.parametrize("kind", ["dynamic", "offloaded", "think"])
def test_out_of_memory_halves_the_batch_until_it_fits(checkpoint, monkeypatch, kind):
    docs = [{"text": f"question {i}"} for i in range(3)]
    options = {"batch_size": 3, "on_oom": "halve_batch", "cache_implementation": kind}
    lm = load_lm(checkpoint("llama"), method="snapkv", ratio=0.5, **options)
    expected = texts(lm.generate_until(requests(lm, docs)))
    lm.reset_rows()
    attempts = no_memory_for(lm, monkeypatch, lambda batch, _: batch > 1)
    assert texts(lm.generate_until(requests(lm, docs))) == expected
    assert [batch for batch, _ in attempts] == [3, 1, 2, 1, 1]
    assert [row["on_oom"] for row in lm.rows] == ["halve_batch"] * 3
    assert [row["batch_size"] for row in lm.rows] == [1] * 3


@pytest.mark.parametrize(("kind", "offloaded"), [("dynamic", "offloaded"), ("static", "offloaded_static")])
def test_out_of_memory_offloads_that_batch_only(checkpoint, monkeypatch, kind, offloaded):
    docs = [{"text": f"question {i}"} for i in range(3)]
    lm = load_lm(checkpoint("llama"), on_oom="offload", method="snapkv", ratio=0.5, cache_implementation=kind)
    expected = texts(lm.generate_until(requests(lm, docs)))
    lm.reset_rows()
    refused = iter([False, True, False, False])
    attempts = no_memory_for(lm, monkeypatch, lambda _, used: used == kind and next(refused))
    assert texts(lm.generate_until(requests(lm, docs))) == expected
    assert [row["on_oom"] for row in lm.rows] == [None, "offload", None]
    assert [used for _, used in attempts] == [kind, kind, offloaded, offloaded, kind], "another cache is warmed up"
    assert lm.compression.options["cache_implementation"] == kind


@pytest.mark.parametrize("on_oom", ["raise", "halve_batch", "offload"])
def test_memory_that_never_suffices_and_other_errors_end_the_run(checkpoint, monkeypatch, on_oom):
    lm = load_lm(checkpoint("llama"), on_oom=on_oom)
    no_memory_for(lm, monkeypatch, lambda *_: True)
    before = lm.compression
    with pytest.raises(torch.OutOfMemoryError):
        lm.generate_until(requests(lm, [{"text": "hello"}]))
    assert lm.compression is before, "the cell goes on as it was set"
    attempts = no_memory_for(lm, monkeypatch, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lm.generate_until(requests(lm, [{"text": "hello"}]))
    assert len(attempts) == 1


def test_measurements_path_holds_all_rows_of_all_evaluations(tmp_path, checkpoint):
    path = tmp_path / "new" / "rows.jsonl"
    lm = load_lm(checkpoint("llama"), measurements_path=str(path))
    lm.generate_until(requests(lm, [{"text": "b"}, {"text": "aa"}], task="x"))
    lm.generate_until(requests(lm, [{"text": "c"}], task="a"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["task"], row["doc_id"]) for row in rows] == [("a", 0), ("x", 0), ("x", 1)]
    assert [file.name for file in path.parent.iterdir()] == ["rows.jsonl"]


# -- the life of a model ----------------------------------------------------------------------------------------------


def test_rounds_follow_the_task_and_each_has_a_row(lm, tmp_path, monkeypatch):
    """A task of two rounds whose second question quotes the first answer and adds an image; and one of one round."""

    def rounds(doc, round_idx=None, previous_output=None, previous_round_info=None):
        if round_idx is None:
            return messages({"text": doc["text"]})
        if round_idx == doc["rounds"]:
            return None, True, previous_output, None
        assert previous_round_info == ("seen" if round_idx > 1 else None)
        content = {"text": f"you said {previous_output[-1]}. and here?", "images": [image(1)]}
        return messages(content), False, previous_output, "seen"

    docs = [{"text": "what is it?", "rounds": 3}, {"text": "hello", "rounds": 1}]
    lm.set_cell(method="snapkv", ratio=0.5)
    made = requests(lm, docs)
    for request in made:
        request.arguments = (request.args[0], rounds, *request.args[2:])
    monkeypatch.setattr(lm, "args", lm.args.model_copy(update={"measurements_path": tmp_path / "rows.jsonl"}))
    first, second = lm.generate_until_multi_round(made)
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == lm.gather_rows()
    assert [(row["doc_id"], row["round"]) for row in lm.gather_rows()] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    follow_up = {"text": f"you said {first[0]}. and here?", "images": [image(1)]}
    expected = lm.generate_until(requests(lm, [{"text": "what is it?"}, follow_up, {"text": "hello"}]))
    assert [first[0], first[1], second[0]] == texts(expected)


def test_lmms_evals_clean_keeps_the_model_and_unload_frees_it(checkpoint):
    lm = load_lm(checkpoint("llama"), fresh=True)
    lm.clean()
    lm.generate_until(requests(lm, [{"text": "hello"}]))
    model = weakref.ref(lm.model)
    lm.unload()
    assert model() is None


def test_other_request_types_are_clear_errors(lm):
    with pytest.raises(NotImplementedError, match="generate_until"):
        lm.loglikelihood([])


# -- lmms-eval's own command ------------------------------------------------------------------------------------------

TASKS = Path(__file__).parents[3] / "lmms_eval_plugins" / "tasks"


def lmms_eval(tmp_path, *launcher: str, more: str = "") -> tuple[dict, list[dict]]:
    """Runs `python -m lmms_eval` on six bundled questions: its results file, and our measurement rows."""
    rows = tmp_path / "rows.jsonl"
    arguments = f"pretrained=tiny,method=snapkv,ratio=0.2,window_size=8,dtype=float32,measurements_path={rows}{more}"
    command = [sys.executable, "-m", *launcher, "lmms_eval", "--model", "kvcompress", "--model_args", arguments]
    command += ["--tasks", "tiny_textvqa", "--limit", "6", "--include_path", str(TASKS), "--device", "cpu"]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    files = list((tmp_path / "out").rglob("*_results.json"))
    assert files, done.stdout + done.stderr
    return json.loads(files[0].read_text()), [json.loads(line) for line in rows.read_text().splitlines()]


@pytest.mark.slow
def test_the_plain_lmms_eval_command_writes_averages_and_two_ranks_give_its_scores_and_rows(tmp_path):
    one, rows = lmms_eval(tmp_path / "one")
    assert [row["doc_id"] for row in rows] == list(range(6))
    assert one["throughput"]["avg_realised_ratio"] == pytest.approx(0.2, abs=0.01)
    assert one["throughput"]["avg_ttft_s"] > 0
    assert one["efficiency"]["overall"]["total_input_tokens"] == sum(row["tokens_in"] for row in rows)
    launcher = ("torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29641", "-m")
    for name, more in (("two", ""), ("exchanged", ",prefix_cache_gb=1")):
        two, rows = lmms_eval(tmp_path / name, *launcher, more=more)
        key = "exact_match,none"
        assert two["results"]["tiny_textvqa"][key] == one["results"]["tiny_textvqa"][key]
        assert [row["doc_id"] for row in rows] == list(range(6))


def test_a_seed_of_the_task_makes_sampling_the_same_each_time_and_repetitions_differ(checkpoint):
    sampled = {"do_sample": True, "temperature": 1.0, "max_new_tokens": 12}

    def answers(seed, repeats=1):
        lm = load_lm(checkpoint("llama"))
        return texts(lm.generate_until(requests(lm, [{"text": "a question"}], seed=seed, **sampled) * repeats))

    first = answers(7, repeats=2)
    assert first == answers(7, repeats=2)
    assert first[0] != first[1]
    assert answers(8) == first[1:]  # the second time that a question is asked it has the next seed
    assert answers(9) not in ([first[0]], [first[1]])


@pytest.mark.parametrize("skips", [True, False])
def test_no_space_of_an_answer_is_tidied_away(skips):
    of_bpe = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
    tokenizer = AutoTokenizer.from_pretrained(TINY_CHECKPOINT, clean_up_tokenization_spaces=True, **of_bpe)
    ids = tokenizer("red , blue", add_special_tokens=False, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "red, blue"
    ends = SimpleNamespace(eos_token_id=tokenizer.eos_token_id)
    answering = SimpleNamespace(tokenizer=tokenizer, model=SimpleNamespace(generation_config=ends))
    assert Answering.texts(answering, ids, [ids.shape[1]], skips) == ["red , blue"]


def test_special_tokens_stay_in_an_answer_where_the_task_wants_them(checkpoint):
    lm = load_lm(checkpoint("llama"), batch_size=2, fresh=True)
    (plain,) = texts(lm.generate_until(requests(lm, [{"text": "a question"}])))
    second = lm.tokenizer(plain, add_special_tokens=False)["input_ids"][1]
    lm.tokenizer.add_special_tokens({"additional_special_tokens": [lm.tokenizer.convert_ids_to_tokens(second)]})
    lm.answering.tokenizer = lm.tokenizer
    docs = [{"text": "a question"}, {"text": "a longer question, so that this one is padded"}]
    without, _ = texts(lm.generate_until(requests(lm, docs)))
    with_them, _ = texts(lm.generate_until(requests(lm, docs, skip_special_tokens=False)))
    assert len(without) < len(with_them)
    assert "pad" not in with_them
