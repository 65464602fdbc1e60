"""Every model argument is checked, and wrong ones are answered with one helpful line."""

from pathlib import Path

import pytest

from kvcompress import KVCompressError
from lmms_eval_plugins.model.arguments import (
    LEGACY_ARGUMENTS,
    TINY_CHECKPOINT,
    ModelArguments,
    Size,
    make_compression,
    model_arguments,
    parse_arguments,
)
from lmms_eval_plugins.model.generation import generation_of

DOCS = Path(__file__).parents[3] / "docs" / "model-args.md"


def test_values_as_lmms_eval_parses_them():
    args, cell = parse_arguments(
        pretrained="org/name", method="snapkv", ratio=0.2, window_size=8, batch_size="4", revision=123456, device="None"
    )
    assert (args.pretrained, args.batch_size, args.revision, args.device) == ("org/name", 4, "123456", None)
    assert (cell.method, cell.ratio, cell.budget, cell.options) == ("snapkv", 0.2, None, {"window_size": 8})


@pytest.mark.parametrize("none", [None, "None", "none"])
def test_none_means_the_default(none):
    args, cell = parse_arguments(
        pretrained="m", method=none, ratio=none, dtype=none, max_pixels=none, max_batch_size=none
    )
    assert (cell.method, cell.ratio, args.dtype, args.max_pixels) == ("full", None, "auto", None)


@pytest.mark.parametrize(("given", "merge"), [("none", "none"), ("None", "d2o"), (None, "d2o"), ("average", "average")])
def test_no_merging_is_a_value_and_not_the_default(given, merge):
    assert make_compression("d2o", 0.2, merge=given).policy.chosen("merge") == merge


def test_tiny_is_the_bundled_checkpoint():
    args, _ = parse_arguments(pretrained="tiny")
    assert Path(args.pretrained) == TINY_CHECKPOINT
    assert (TINY_CHECKPOINT / "config.json").is_file()


def test_a_relative_measurements_path_is_fixed_at_the_start(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    args, _ = parse_arguments(pretrained="m", measurements_path="rows.jsonl")
    assert args.measurements_path == tmp_path / "rows.jsonl"


# fmt: off
REFUSED = [  # arguments, and what the line about them says
    ({"pretrained": None}, "pretrained= is missing.*tiny"),
    ({"max_num_frames": 1}, "did you mean 'max_frames_num'.*valid: .*attn_implementation"),
    ({"methd": 1}, "did you mean 'method'"),
    ({"batchsize": 1}, "did you mean 'batch_size'"),
    ({"method": "snapk", "ratio": 0.2}, "did you mean 'snapkv'"),
    ({"method": "blynd"}, "there is no method 'blynd' .did you mean 'blind'"),
    ({"method": "snapkv", "ratio": 0.2, "windowsize": 8}, "did you mean 'window_size'"),
    ({"method": "snapkv", "ratio": 0.2, "contextual": 0.5},
     "'contextual' is an option of fastvid, visionzip, not of snapkv; valid: window_size"),
    ({"method": "snapkv"}, "needs ratio="),
    ({"method": "snapkv", "ratio": 0.2, "budget": 64}, "either"),
    ({"method": "snapkv", "ratio": 1.5}, "1.5"),
    ({"method": "snapkv", "budget": 0}, "budget=0"),
    ({"method": "snapkv", "ratio": 0.5, "pooling": "median"}, "pooling"),
    ({"method": "full", "ratio": 0.5}, "full"),
    ({"method": "downsample"}, "'downsample' needs ratio= or budget="),
    ({"method": "downsample", "ratio": 0.5, "window_size": 8}, "window_size.*downsample"),
    ({"method": "downsample", "ratio": 0.5, "ratio_of": "prompt"},
     "changes pictures only: ratio_of='vision', not 'prompt'"),
    ({"method": "downsample", "ratio": 0.5, "fewer_frames": "maybe"}, "option 'fewer_frames' is 'maybe'"),
    ({"method": "downsample", "ratio": 1.5}, r"ratio=1.5 is not in \(0, 1\]"),
    ({"method": "blind", "ratio": 0.5}, "'blind' takes no size: ratio=0.5, budget=None"),
    ({"method": "blind", "budget": 5}, "'blind' takes no size"),
    ({"batch_size": "auto:0"}, "batch_size='auto:0' is neither a positive whole number, nor auto, nor auto:N"),
    ({"batch_size": 1.5}, "batch_size=1.5 is neither"),
    ({"batch_size": "auto", "tp_plan": "auto"}, "batch_size='auto' does not go with tp_plan"),
    ({"slots": "auto:2"}, "slots='auto:2' is neither a positive whole number, nor auto"),
    ({"prefill_tokens": 64}, "prefill_tokens= goes with a number of slots, not with slots=None"),
    ({"slots": "auto", "prefill_tokens": 64}, "goes with a number of slots, not with slots='auto'"),
    ({"slots": 4, "batch_size": 2}, "slots=4 does not go with batch_size=2"),
    ({"slots": "auto", "batch_size": "auto"}, "slots='auto' does not go with batch_size='auto'"),
    ({"slots": 4, "on_oom": "offload"}, "on_oom='offload' does not go with slots=4: raise and halve_batch do"),
    ({"slots": 4, "tp_plan": "auto"}, "slots=4 does not go with tp_plan='auto'"),
    ({"slots": 4, "max_batch_size": 2}, "max_batch_size=2 goes with batch_size=auto only"),
    ({"slots": 4, "cache_implementation": "offloaded"}, "slots=4 does not go with cache_implementation="),
    ({"max_batch_size": 8}, "max_batch_size"),
    ({"method": "knorm", "ratio": 0.5, "scope": "context-first", "batch_size": 2},
     "scope='context-first' does not go with batch_size=2: it reads one prompt at a time"),
]
LEGACY = [  # name, what transformers does (accepted), another value, what its error says instead
    ("truncation", False, True, "max_pixels="),
    ("truncate_context", False, True, "max_frames_num="),
    ("model_name", "None", "llava_qwen", "config.json"),
    ("conv_template", "None", "qwen_1_5", "chat_template=FILE"),
    ("customized_config", "None", "cfg.json", "pretrained="),
    ("mm_spatial_pool_stride", 2, 4, "pools video frames by 2"),
    ("mm_spatial_pool_mode", "bilinear", "average", "bilinearly"),
    ("token_strategy", "single", "multiple", "one placeholder"),
    ("video_decode_backend", "pyav", "decord", "PyAV"),
]
# fmt: on


@pytest.mark.parametrize(
    ("arguments", "said"), [*REFUSED, *(({name: wrong}, f"^{name}={wrong}.*{said}") for name, _, wrong, said in LEGACY)]
)
def test_what_is_wrong_is_one_line_that_names_it(arguments, said):
    with pytest.raises(KVCompressError, match=said) as error:
        parse_arguments(**{"pretrained": "some/model", **arguments})
    assert "\n" not in str(error.value)


def test_arguments_of_the_llava_wrapper_may_say_what_transformers_does():
    assert {name for name, *_ in LEGACY} == set(LEGACY_ARGUMENTS)
    parse_arguments(pretrained="m", **{name: accepted for name, accepted, *_ in LEGACY})


def test_a_compression_is_checked_without_a_model():
    assert make_compression("random", 0.1, seed=3).options == {"seed": 3}
    assert make_compression().method == "full"
    with pytest.raises(KVCompressError, match="kernel_size"):
        make_compression("snapkv", 0.1, kernel_size=4)
    with pytest.raises(KVCompressError, match="'downsample' has no option 'window_size'"):
        make_compression("downsample", 0.5, window_size=8)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({}, {"do_sample": False, "max_new_tokens": 128, "temperature": None}),
        ({"max_new_tokens": 16, "temperature": 0, "do_sample": False}, {"do_sample": False, "max_new_tokens": 16}),
        ({"temperature": 0.7, "top_p": 0.9}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}),
        ({"temperature": 0.7, "do_sample": False}, {"do_sample": False, "temperature": None}),
        ({"temperature": 0, "do_sample": True}, {"do_sample": False, "temperature": None}),
        ({"do_sample": True}, {"do_sample": True}),
        ({"num_beams": 2, "repetition_penalty": 1.1}, {"num_beams": 2, "repetition_penalty": 1.1}),
        ({"image_aspect_ratio": "original"}, {"do_sample": False}),
    ],
)
def test_generation_arguments_of_a_task(task, expected):
    kwargs = generation_of(task, max_new_tokens=128).arguments
    assert expected.items() <= kwargs.items()
    assert "image_aspect_ratio" not in kwargs


@pytest.mark.parametrize(
    ("until", "kept"),
    [
        (["\n\n"], []),
        (None, []),
        ([], []),
        ("", []),
        ("Q:", ["Q:"]),
        (["Q:", "\n\n"], ["Q:", "\n\n"]),
        (0, ["0"]),  # of --gen_kwargs until=0
        ([0, "Q:"], ["0", "Q:"]),
    ],
)
def test_stop_strings_are_the_tasks_own_never_lmms_evals_default(until, kept):
    assert generation_of({"until": until}, 8).until == kept


def test_what_tasks_write_for_other_engines_is_understood():
    of_hd_epic = generation_of({"until": ["\n\n"], "stop_sequences": ["\n"], "temperature": 0}, 8)
    assert (of_hd_epic.until, of_hd_epic.arguments["do_sample"]) == (["\n"], False)
    assert generation_of({"until": ["Q:"], "stop_strings": "A:"}, 8).until == ["Q:", "A:"]
    of_microvqa = generation_of({"seed": 3, "do_sample": True, "temperature": 1.0}, 8)
    assert (of_microvqa.seed, "seed" in of_microvqa.arguments) == (3, False)
    of_openai_math = generation_of({"skip_special_tokens": False}, 8)
    assert (of_openai_math.skip_special_tokens, generation_of({}, 8).skip_special_tokens) == (False, True)
    assert not {"seed", "skip_special_tokens", "stop_sequences"} & of_openai_math.arguments.keys()


def test_an_unknown_generation_argument_is_an_error_and_so_is_a_stop_string_that_was_read_as_true():
    with pytest.raises(KVCompressError, match=r"did you mean 'max_new_tokens'"):
        generation_of({"max_new_token": 5}, 8)
    with pytest.raises(KVCompressError, match=r"until=\[True\] is not text"):
        generation_of({"until": True}, 8)


def test_every_argument_is_documented():
    text = DOCS.read_text(encoding="utf-8")
    names = {*ModelArguments.model_fields, *Size.model_fields, *LEGACY_ARGUMENTS} - {"legacy"}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{% for m in messages %}\n{{ m['content'] }", "is no Jinja template: line 2: unexpected '}'"),
        ("{% for m in messages %}", "is no Jinja template: line 1: Unexpected end of template"),
    ],
)
def test_a_chat_template_of_wrong_syntax_is_one_line_before_anything_is_loaded(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)  # a long path would be shortened
    (tmp_path / "t.jinja").write_text(text)
    with pytest.raises(KVCompressError) as error:
        model_arguments(pretrained="m", chat_template="t.jinja")
    assert f"t.jinja' {said}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_chat_template_may_have_the_tags_that_transformers_knows(tmp_path):
    text = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% break %}{% endfor %}"
    (tmp_path / "t.jinja").write_text(text)
    assert model_arguments(pretrained="m", chat_template=str(tmp_path / "t.jinja")).chat_template
