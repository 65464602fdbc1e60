"""The tasks of the table of methods: the bundled model in each regime, and a small pretrained language model."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcompress.calibration.files import BUNDLED
from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT, TINY_MODEL
from lmms_eval_plugins.tasks.regimes import process_long_results
from lmms_eval_plugins.tiny_vlm.accuracy import MAX_NEW_TOKENS, MAX_TOKENS_OF_REGIMES, Reader
from lmms_eval_plugins.tiny_vlm.dataset import HEADLINE, read_examples
from lmms_eval_plugins.tiny_vlm.questions import Example, Shown
from lmms_eval_plugins.tiny_vlm.regimes import file_of, read_prompts

from .learned import NOTES as LEARNED_QWEN2
from .method_cells import Column, Protocol, Task, by_text
from .pretrained import load_gemma3, load_smollm2
from .retrieval import CONTEXT_TOKENS, LIST_QUESTION, draw_examples, draw_names, numbered, prompt_of, share_repeated
from .ruler import NEEDLE_TOKENS, needles, qwen2

QUERY_AWARE = Protocol("query-aware", {"scope": "prompt", "first_token": "compressed"})


def decode_budgets(*columns: tuple[int, int]) -> Protocol:
    """Return the protocol of a budget for prompt and answer together; columns: (budget, interval)."""
    return Protocol(
        "decode budgets",
        {"first_token": "compressed"},
        tuple(
            Column(f"{size} / {interval}", None, {"budget": size, "decode_budget": size, "decode_interval": interval})
            for size, interval in columns
        ),
    )


DECODE_BUDGETS = decode_budgets((192, 8), (96, 8), (48, 8), (96, 1), (96, 32))
SMOLLM2_CALIBRATIONS = Path(__file__).parent / "results" / "calibrations_smollm2"  # benchmarks/calibrations.py
DEFINE_MODEL = ("model.safetensors", "config.json")  # files of the bundled checkpoint


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _hash_with_model(questions: Path) -> str:
    return _hash(*(file.read_bytes() for file in (questions, *(TINY_CHECKPOINT / name for name in DEFINE_MODEL))))


def _is_exact(asked: Example | Shown, text: str) -> bool:
    return text.strip() == asked.question.answer


def _signs_read(asked: Shown, text: str) -> float:
    """Return the task's own `signs_read`."""
    return process_long_results({"answer": asked.question.answer}, [text])["signs_read"]


def tiny(questions: int) -> Task:
    """Questions about one picture, with answers of a few tokens."""
    reader = Reader(TINY_CHECKPOINT)
    examples = read_examples(HEADLINE)[:questions]
    return Task(
        name="tiny",
        title="Methods on the bundled model, `tiny_textvqa`",
        identity=_hash_with_model(HEADLINE),
        model=reader.model,
        questions=len(examples),
        batch_size=25,
        new_tokens=MAX_NEW_TOKENS,
        inputs=lambda batch: reader.inputs(examples[batch]),
        right=by_text(reader.processor, examples, _is_exact),
        protocols=(QUERY_AWARE,),
        has_images=True,
        window_size=8,
        calibrations=BUNDLED[TINY_MODEL],
        shows=tuple(_hash(one.pixels.tobytes()) for one in examples),
    )


def regime(
    name: str,
    title: str,
    questions: int,
    batch_size: int,
    alike: Callable[[Shown], Hashable] = lambda shown: None,
    protocols: tuple[Protocol, ...] = (QUERY_AWARE,),
    **options,
) -> Task:
    """Return one of the bundled tasks beyond one picture with a short answer. `alike`: what a batch's prompts share."""
    reader, file = Reader(TINY_CHECKPOINT), file_of(name)
    prompts, is_long = in_batches(read_prompts(file), batch_size, alike)[:questions], name == "read_all"
    return Task(
        name=f"tiny_{name}",
        title=f"{title}, `tiny_{name}`",
        identity=_hash_with_model(file),
        model=reader.model,
        questions=len(prompts),
        batch_size=batch_size,
        new_tokens=MAX_TOKENS_OF_REGIMES if is_long else MAX_NEW_TOKENS,
        inputs=lambda batch: reader.shown_inputs(prompts[batch]),
        right=by_text(reader.processor, prompts, _signs_read if is_long else _is_exact),
        measure="Signs read" if is_long else "Accuracy",
        protocols=protocols,
        has_images=True,
        window_size=8,
        calibrations=BUNDLED[TINY_MODEL],
        shows=tuple(_hash(*_media(one), one.text.encode()) for one in prompts),
        **options,
    )


def _media(shown: Shown) -> list[bytes]:
    return [part.tobytes() for part in (*shown.pictures, *(() if shown.frames is None else shown.frames))]


def in_batches(prompts: list[Shown], batch_size: int, alike: Callable[[Shown], Hashable]) -> list[Shown]:
    """Group like prompts into full batches, in the order in which these fill up, so that a prefix of the list has every
    kind. Incomplete batches are left out."""
    waiting: dict[Hashable, list[Shown]] = defaultdict(list)
    ordered: list[Shown] = []
    for shown in prompts:
        batch = waiting[alike(shown)]
        batch.append(shown)
        if len(batch) == batch_size:
            ordered += batch
            batch.clear()
    return ordered


def read_all(questions: int) -> Task:
    """Long answers, with two protocols: only the prompt is compressed, or a budget also applies while decoding."""
    protocols = (QUERY_AWARE, DECODE_BUDGETS)
    return regime("read_all", "Long answers", questions, 20, protocols=protocols, kept="what is asked")


def multi_image(questions: int) -> Task:
    return regime("multi_image", "Several pictures", questions, 10)


def video(questions: int) -> Task:
    """Video, with clips of one length per batch: transformers' processor cannot batch others."""
    return regime("video", "Video", questions, 10, lambda shown: len(shown.frames))


def needle(questions: int) -> Task:
    """Long texts, half of them after a picture; the prompts of a batch have all or none."""
    return regime("needle", "Long texts", questions, 10, lambda shown: len(shown.pictures))


def smollm2(questions: int) -> Task:
    model, tokenizer = load_smollm2()
    examples = draw_examples(questions)
    question_tokens = len(tokenizer(examples[0].question)["input_ids"])  # the same for all
    prompts = [prompt_of(one, tokenizer) for one in examples]
    expected = [tokenizer(one.answer)["input_ids"] for one in examples]

    def inputs(batch: slice) -> dict[str, torch.Tensor]:
        return dict(tokenizer.pad({"input_ids": prompts[batch]}, return_tensors="pt"))

    def right(batch: slice, new: torch.Tensor) -> list[bool]:
        return [row[: len(one)] == one for row, one in zip(new.tolist(), expected[batch], strict=True)]

    return Task(
        name="smollm2",
        title="Methods on SmolLM2-135M, retrieval from a text",
        identity=_hash(repr((draw_examples(20), CONTEXT_TOKENS, model.dtype)).encode()),
        model=model,
        questions=len(examples),
        batch_size=20,
        new_tokens=max(map(len, expected)),
        inputs=inputs,
        right=right,
        protocols=(
            QUERY_AWARE,
            Protocol(
                "query-agnostic",
                {"scope": "context", "context_tokens": -question_tokens, "first_token": "compressed"},
            ),
        ),
        has_images=False,
        calibrations=SMOLLM2_CALIBRATIONS,
    )


def qwen2_list(questions: int) -> Task:
    """Repeat a numbered list of names, as long as the prompt: what was repeated may be forgotten."""
    _, model, tokenizer = qwen2(torch.float32)  # fewer CPUs multiply in bf16
    lists = [draw_names(number) for number in range(questions)]
    said = [[{"role": "user", "content": f"{numbered(names)}\n\n{LIST_QUESTION}"}] for names in lists]
    longest = max(len(ids) for ids in tokenizer([*map(numbered, lists)])["input_ids"])

    def inputs(batch: slice) -> dict[str, torch.Tensor]:
        return dict(
            tokenizer.apply_chat_template(
                said[batch], add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
            )
        )

    return Task(
        name="qwen2_list",
        title="Long answers on Qwen2.5-Coder-0.5B, a list repeated",
        identity=_hash(repr((said[:2], model.config.model_type, model.dtype)).encode()),
        model=model,
        questions=questions,
        batch_size=questions,
        new_tokens=longest + 8,
        inputs=inputs,
        right=by_text(tokenizer, lists, share_repeated),
        measure="Names repeated",
        protocols=(decode_budgets((256, 8), (128, 8)),),
        has_images=False,
        calibrations=LEARNED_QWEN2,
        kept="what is asked",
    )


def ruler(
    name: str, load: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]], calibrations: Path | None = None
) -> Callable[[int], Task]:
    """Return RULER's needle task for a model: one number in 2,048 tokens of repeated sentences."""

    def task(questions: int) -> Task:
        model, tokenizer = load()
        asked = needles(tokenizer, questions)
        texts, numbers = [text for text, _ in asked], [number for _, number in asked]
        return Task(
            name=name,
            title=f"Methods on RULER's needle, {name}",
            identity=_hash(repr((asked[:2], model.config.model_type, model.dtype)).encode()),
            model=model,
            questions=len(asked),
            batch_size=10,
            new_tokens=NEEDLE_TOKENS,
            inputs=lambda batch: dict(tokenizer(texts[batch], padding=True, return_tensors="pt")),
            right=by_text(tokenizer, numbers, lambda number, text: number in text),
            protocols=(QUERY_AWARE,),
            has_images=False,
            calibrations=calibrations,
        )

    return task


TASKS = {
    "tiny": tiny,
    "tiny_read_all": read_all,
    "tiny_multi_image": multi_image,
    "tiny_video": video,
    "tiny_needle": needle,
    "smollm2": smollm2,
}
BY_NAME = {"qwen2_list": qwen2_list}  # answered only if asked for: hours, of a model of half a gigabyte
RULER = {  # used by own_method.py; they have no tables
    "smollm2_ruler": ruler("smollm2_ruler", load_smollm2, SMOLLM2_CALIBRATIONS),
    "gemma3_ruler": ruler("gemma3_ruler", load_gemma3),
}
