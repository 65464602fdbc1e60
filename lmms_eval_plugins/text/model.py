"""The lm-eval model `kvcompress`: prompts of lm-evaluation-harness, answered by the same model as lmms-eval's.

    python -m lmms_eval_plugins.text run --model kvcompress --model_args pretrained=ID,method=snapkv,ratio=0.2 ...

lm-eval passes prompts as text that includes the examples and, with `--apply_chat_template`, is rendered by the
checkpoint's chat template. They are tokenized as by lm-eval's own `hf` model.
"""

from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs
from lmms_eval.api.instance import Instance as Request

from kvcompress import KVCompressError

from ..model.answerer import Answerer
from ..model.arguments import without_none
from ..model.generation import NO_LIKELIHOOD
from ..model.lm import KVCompressLM
from ..model.loading import load_processor
from ..model.prompts import ChatProcessor
from ..model.ranks import of_each_rank

MAX_NEW_TOKENS = 256  # unless the task or `max_new_tokens=` sets it; the default of lm-eval's `hf` model
DEFAULT_DEVICE = "cuda:0"  # the default of lm-eval's command; without a GPU its `hf` model uses the CPU
SPLIT = "eval"  # lm-eval does not say which split of a task a question comes from


class LmEvalAdapter(LM):
    """Adapts a model with lmms-eval's interface to lm-eval's.

    Attributes:
        answerer: the model.
    """

    def __init__(self, answerer: Answerer):
        super().__init__()
        self.answerer = answerer
        self._chat: ChatProcessor | None = getattr(answerer, "chat", None)
        self._device = answerer.device

    # -- answers --------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Answer the requests, in order."""
        args, rank, ranks = self.answerer.args, self.answerer.rank, self.answerer.world_size
        most = args.max_new_tokens if "max_new_tokens" in args.model_fields_set else MAX_NEW_TOKENS
        converted = [_request(request, most) for request in requests]
        self.answerer.task_dict = documents = {}
        for prompt, _, _, doc_id, task, split in (request.args for request in converted):
            documents.setdefault(task, {}).setdefault(split, {})[doc_id] = prompt
        # lm-eval sees one process, as its draws of examples would depend on their number. So we split the requests.
        places = range(rank, len(converted), ranks) if ranks > 1 else range(len(converted))
        results = self.answerer.generate_until([converted[place] for place in places])
        answers = dict(zip(places, (result.text for result in results), strict=True))
        if ranks > 1:
            answers = {place: text for each in of_each_rank(answers) for place, text in each.items()}
        self.answerer.clean()
        return [answers[place] for place in range(len(converted))]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise KVCompressError(f"--model kvcompress answers generate_until tasks only: {NO_LIKELIHOOD}")

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return self.loglikelihood(requests)

    # -- prompts --------------------------------------------------------------------------------------------------

    @property
    def chat(self) -> ChatProcessor:
        """The checkpoint's chat processor, loaded here if the model is not (when scoring stored answers)."""
        if self._chat is None:
            self._chat = ChatProcessor(self.answerer.args, load_processor(self.answerer.args)[1])
        return self._chat

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation with the checkpoint's chat template; without `add_generation_prompt`, its last message
        is the beginning of the answer. Raises KVCompressError if the template refuses it."""
        if self.chat.processor.chat_template is None:
            raise KVCompressError(f"{self.answerer.args.pretrained} has no chat template: give chat_template=FILE")
        parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in chat_history]
        return self.chat.templated(parts, starts_answer=not add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template's text, for lm-eval's records."""
        return str(self.chat.processor.chat_template) if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """The name used by lm-eval's cache of requests."""
        return self.answerer.args.pretrained.replace("/", "__")


class KVCompressTextLM(LmEvalAdapter):
    """The model `--model kvcompress` of lm-eval's own command. `arguments` as in docs/model-args.md."""

    def __init__(self, **arguments: Any):
        if arguments.get("device") == DEFAULT_DEVICE and not torch.cuda.is_available():
            del arguments["device"]
        super().__init__(KVCompressLM(needs_template=False, **without_none(arguments)))


def _request(request: Instance, most: int) -> Request:
    """Convert lm-eval's request to lmms-eval's. Its document is the prompt, which is written already."""
    prompt, kwargs = request.args[:2]
    split = SPLIT if request.idx == 0 else f"{SPLIT} {request.idx}"  # a question may have several prompts
    metadata = {"task": request.task_name, "doc_id": request.doc_id, "repeats": request.repeats}
    arguments = (prompt, _written, generation_kwargs(kwargs, most), request.doc_id, request.task_name, split)
    return Request(request_type="generate_until", arguments=arguments, idx=request.idx, metadata=metadata)


def _written(prompt: str) -> str:
    """Return a document's messages, as lmms-eval's `doc_to_messages` does."""
    return prompt


def generation_kwargs(given: dict[str, Any], most: int) -> dict[str, Any]:
    """Translate lm-eval's generation kwargs to transformers' names; `most`: default number of new tokens."""
    kwargs = dict(normalize_gen_kwargs(given, most))
    stops, new_tokens = kwargs.pop("until", []), kwargs.pop("max_gen_toks")
    return {**kwargs, "stop_strings": stops, "max_new_tokens": new_tokens}
