"""What a request for a chat completion may ask, and the model inputs of its prompt."""

import base64
import io
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from PIL import UnidentifiedImageError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from transformers import BatchFeature, PreTrainedModel

from ..errors import shown
from ..pictures import read_image

NO_MEMORY = "there is not enough memory for the pictures of this request at present"
GREEDY_BELOW = 1e-5  # as in vLLM: divided by less, logits overflow
MOST_PIXELS = 2**27  # of a request's images together: a few kB can be a picture of any size
SMALL = 2**18  # pixels that an image counts as at least: processors enlarge those of one pixel


class _Strict(BaseModel):
    """What a request may have. Of many mistakes few are looked at: for a million pydantic takes a minute."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _only_our_fields(cls, data: Any) -> Any:
        """Refuse other fields. One that is null is not given, also where it is none of ours."""
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        if (other := next((name for name in given if name not in cls.model_fields), None)) is not None:
            raise PydanticCustomError("other_field", "{name} is not supported by this server", {"name": shown(other)})
        return given


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ImageUrl(_Strict):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"  # the processor decides


class ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _system(role: Any) -> Any:
    return "system" if role == "developer" else role  # OpenAI's newer name


def _several(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
StopStrings = Annotated[
    list[Annotated[str, StringConstraints(min_length=1)]], Field(fail_fast=True), BeforeValidator(_several),
    Field(max_length=16),
]  # fmt: skip


class Message(_Strict):
    role: Annotated[Literal["system", "user", "assistant"], BeforeValidator(_system)]
    content: Annotated[list[Part], Field(fail_fast=True), BeforeValidator(_parts), Field(min_length=1)]


class StreamOptions(_Strict):
    include_usage: bool = False


class TextFormat(_Strict):
    type: Literal["text"]


class Asked(_Strict):
    """The body of a request, in OpenAI's words. What would be ignored is refused, except for a client's notes.

    Attributes:
        temperature: None, like 0 and what is next to it, is greedy.
        return_token_ids: whether the answer lists its tokens, as in vLLM.
    """

    model: str
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: StopStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    # Accepted where they ask for what is done anyway:
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    response_format: TextFormat | None = None
    store: Literal[False] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    # Notes of the client:
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @classmethod
    def of(cls, body: bytes) -> "Asked":
        """Parse a body. Raises HTTPException, status 400."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise HTTPException(400, f"{place}: {first['msg']}" if place else first["msg"]) from None

    @model_validator(mode="after")
    def _check_together(self) -> "Asked":
        if self.top_p not in (None, 1) and self.temperature is None:
            raise PydanticCustomError("top_p", "top_p needs a temperature: without one the answer is greedy")
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def options(self) -> dict[str, Any]:
        """Return how `generate` chooses tokens."""
        if (self.temperature or 0) < GREEDY_BELOW:
            return {"do_sample": False}
        top_p = 1.0 if self.top_p is None else self.top_p
        return {"do_sample": True, "temperature": self.temperature, "top_p": top_p, "top_k": 0}

    def drawn_seed(self) -> int:
        """Return the seed; where none is given a random one, as a request that begins again must draw the same."""
        return secrets.randbits(63) if self.seed is None else self.seed


@dataclass(frozen=True)
class Prompts:
    """Makes model inputs of messages.

    Attributes:
        model: the model, of which only the configuration is read.
        processor: its processor; for a text-only model the tokenizer.
        max_tokens: the most new tokens of an answer.
    """

    model: PreTrainedModel
    processor: Any
    max_tokens: int

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def ends(self) -> set[int]:
        """The tokens that end an answer."""
        ends = self.model.generation_config.eos_token_id
        return set(ends) if isinstance(ends, list) else {ends}

    def inputs(self, messages: list[Message]) -> Mapping[str, torch.Tensor]:
        """Return the model inputs, on the CPU. Raises HTTPException, status 400."""
        sees = self.tokenizer is not self.processor
        conversation, pixels = [], 0
        for message in messages:
            parts = []
            for part in message.content:
                parts.append(_read(part))
                if image := parts[-1].get("image"):
                    pixels += max(image.width * image.height, SMALL)
                if pixels > MOST_PIXELS:
                    raise HTTPException(
                        400, f"the images have more than {MOST_PIXELS} pixels, each counted as at least {SMALL}"
                    )
            if not sees and pixels:
                raise HTTPException(400, f"{self.model.config.model_type} is a model of text only: it sees no images")
            content = parts if sees else "\n".join(part["text"] for part in parts)
            conversation.append({"role": message.role, "content": content})
        try:
            made = self.processor.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            )
        except MemoryError:
            raise HTTPException(503, NO_MEMORY) from None
        except Exception as error:  # a template or a processor may raise anything about what a user wrote
            raise HTTPException(400, f"the prompt is refused: {type(error).__name__}: {error}") from error
        return BatchFeature(dict(made)).to(self.model.dtype)

    def room(self, tokens_in: int, wanted: int | None) -> int:
        """Return how many new tokens a prompt may get. Raises HTTPException, status 400, for too long a prompt or too
        many tokens."""
        longest = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        left = self.max_tokens if longest is None else longest - tokens_in
        if wanted is not None and wanted > self.max_tokens:
            raise HTTPException(400, f"max_tokens: {wanted} exceeds this server's {self.max_tokens}")
        if left < (wanted or 1):
            raise HTTPException(400, f"a prompt of {tokens_in} tokens and {wanted or 1} of the answer exceed {longest}")
        return wanted or min(left, self.max_tokens)


def _read(part: TextPart | ImagePart) -> dict[str, Any]:
    """Return a part as chat templates expect it."""
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    head, _, data = part.image_url.url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise HTTPException(400, "an image_url must be a data: URL in base64; this server fetches nothing")
    try:
        return {"type": "image", "image": read_image(io.BytesIO(base64.b64decode(data, validate=True)))}
    except MemoryError:
        raise HTTPException(503, NO_MEMORY) from None
    except UnidentifiedImageError:  # whose own message names an address in memory
        raise HTTPException(400, "an image cannot be read: Pillow does not know its format") from None
    except Exception as error:  # each of Pillow's decoders raises what it likes
        raise HTTPException(400, f"an image cannot be read: {type(error).__name__}: {error}") from None
