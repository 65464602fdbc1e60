"""The schema of a cell's files: the type of every field that is read. Other fields may hold anything."""

from functools import cache
from typing import Annotated, Any

from pydantic import Field, Strict, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from kvcompress.errors import MOST, shown

Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]  # not NaN, which Python reads as JSON
Count = Annotated[int, Strict(), Field(ge=0, le=MOST)]
Text = Annotated[str, Strict()]
KINDS = ("float", "Spread")  # members of a union, which pydantic puts into the location of an error


class Settings(TypedDict):
    repeats: NotRequired[Annotated[int, Strict(), Field(ge=1, le=MOST)]]


class Protocol(TypedDict):
    task: Text
    model: Text
    method: Text
    ratio: Number | None
    budget: Number | None
    settings: Settings
    changed_options: dict[Text, Any]
    options: NotRequired[dict[Text, Any]]


class Spread(TypedDict):
    mean: NotRequired[Number | None]
    median: NotRequired[Number | None]
    per_layer: NotRequired[list[Number]]


class TaskConfig(TypedDict):
    metric_list: NotRequired[list[dict[Text, Any]] | None]
    score_key: NotRequired[Text | None]
    cluster_key: NotRequired[Text | None]


class Sums(TypedDict):
    tokens_out: Number
    score: Number


class Environment(TypedDict):
    versions: NotRequired[dict[Text, Text]]
    device: NotRequired[Text]
    processes: NotRequired[Count]


class Results(TypedDict):
    protocol: Protocol
    results: dict[Text, dict[Text, Any]]
    efficiency: dict[Text, Number | Spread | None]
    n_samples: Count
    n_questions: NotRequired[Count]
    configs: NotRequired[dict[Text, TaskConfig]]
    group_subtasks: NotRequired[dict[Text, list[Text]]]
    metric_questions: NotRequired[dict[Text, dict[Text, Count]]]
    metric_tokens: NotRequired[dict[Text, dict[Text, Sums]]]
    throughput: NotRequired[dict[Text, Any] | None]
    environment: NotRequired[Environment]


class Measurement(TypedDict):
    ttft_s: NotRequired[Number | None]  # these are not of a server's answer
    tpot_s: NotRequired[Number | None]
    tokens_in: Number
    tokens_out: Number
    vision_tokens: NotRequired[Number]
    kv_bytes_prompt: NotRequired[Number]
    shows: NotRequired[Text]


class Sample(TypedDict):
    task: Text
    doc_id: Annotated[int, Strict()]
    filtered_resps: list[Any]
    measurement: Measurement
    measurements: NotRequired[list[Measurement]]


class Packed(TypedDict):
    shape: list[Count]


class Header(TypedDict):
    asked: Count


class Picture(TypedDict):
    file: NotRequired[Annotated[str, Strict(), Field(pattern=r"^[0-9a-f]{16}\.jpg$")]]  # in one folder, nowhere else


class Entry(TypedDict):
    task: Text
    doc_id: Annotated[int, Strict()]
    layers: list[Any]
    kv_heads: Count
    vision: Packed
    text: Packed
    pieces: list[Text]
    images: list[Picture]


def fault(content: Any, kind: type) -> str | None:
    """Say in one line which field of `content` has the wrong type; None if all match `kind`."""
    if not isinstance(content, dict):
        return f"not an object but {type(content).__name__}"
    try:
        _adapter(kind).validate_python(content)
    except ValidationError as error:
        first = max(error.errors(), key=lambda each: len(each["loc"]))  # of a union, the member that fits best
        where = ".".join(str(part) for part in first["loc"] if part not in KINDS)
        if first["type"] == "missing":
            return f"no {where}"
        return f"{where} is {shown(first['input'])}: {first['msg']}"
    return None


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
