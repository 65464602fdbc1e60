"""What does not go together, and why: one table, which `make_policy`, each way to run a model and the docs read."""

from collections.abc import Callable
from typing import NamedTuple

from ..clusters.base import KVCluster
from ..errors import KVCompressError
from ..methods import method_info
from ..scoring.selection import ADAPTIVE
from .options import PRESCRIBED, Engine
from .policy import Policy

SCORER, CALIBRATION, MEASURED = "scorer=", "calibration=", "a measured layer_budget="
HIDDEN_STATES = "a method that reads hidden states"
BIASES = "a bias of each key"
CONTEXT_FIRST = "scope='context-first'"
DECODE_EVICTION, PREFILL_CHUNK, FAIR = "decode_budget= or decode_ratio=", "prefill_chunk=", "fair="
MOVED_KEYS = "positions='cache' while decoding evicts"
TENSOR_PARALLEL, PAGES, SPEECH = "tensor parallelism", "continuous batching", "spoken answers"

CHOICE = ("keep", "select", "update_kv")  # what a method overrides that chooses by more than scores
STORED_ONCE = "what it stores stays where it is; dynamic and offloaded work"
FITTED = "it fits biases and values to a prompt's queries"
SHARED_TABLE = "all layers and KV heads share a request's page table, so each keeps as many entries"


class Conflict(NamedTuple):
    """What does not go with a feature.

    Attributes:
        feature: an option, or a way to run the model.
        other: an option's name, or `method`, where their value is what does not fit; otherwise a description.
        reason: why not, as the end of a sentence.
        applies: whether a policy has it; None: whether the option `other` is not the default.
    """

    feature: str
    other: str
    reason: str
    applies: Callable[[Policy], bool] | None = None

    def is_in(self, policy: Policy) -> bool:
        if self.applies is None:
            return getattr(policy.engine, self.other) != getattr(Engine, self.other)
        return self.applies(policy)

    def message(self, policy: Policy) -> str:
        """Return the error's text, with the policy's own values."""
        if self.other == "method":
            by = f" with scorer={policy.engine.scorer!r}" if policy.engine.scorer and self.feature != SCORER else ""
            other = f"method {policy.method!r}{by}"
        elif hasattr(policy.engine, self.other):
            value = policy.chosen(self.other) if self.other in PRESCRIBED else getattr(policy.engine, self.other)
            other = f"{self.other}={value!r}"
        else:
            other = self.other
        return f"{other} does not go with {self.feature}: {self.reason}"


def check_conflicts(policy: Policy, *features: str) -> None:
    """Raise KVCompressError for the first conflict of the policy with one of the `features`."""
    for conflict in CONFLICTS:
        if conflict.feature in features and conflict.is_in(policy):
            raise KVCompressError(conflict.message(policy))


def _overrides(cls: type, *names: str) -> bool:
    return any(getattr(cls, name, None) is not getattr(KVCluster, name) for name in names)


def _chooses_by_more_than_scores(policy: Policy) -> bool:
    return policy.method == "full" or _overrides(method_info(policy.method).cls, *CHOICE)


def _stores_once(policy: Policy) -> bool:
    return policy.engine.cache_implementation not in ("dynamic", "offloaded")


def _measures_layers(policy: Policy) -> bool:
    return policy.layer_budget.is_measured


def _protects_prompt(policy: Policy) -> bool:
    return policy.protect is not None and policy.protect.whole_prompt


def _drops_tokens(policy: Policy) -> bool:
    return policy.tokens is not None


def _cluster(attribute: str) -> Callable[[Policy], bool]:
    """Return a predicate: whether this attribute of the policy's cluster is set."""
    return lambda policy: bool(getattr(policy.cluster, attribute))


CONFLICTS = (
    Conflict(SCORER, "method", "it chooses by more than scores", _chooses_by_more_than_scores),
    Conflict(
        CALIBRATION,
        "layer_budget",
        "the file says what each layer keeps",
        lambda policy: bool(policy.known_layer_budget) and policy.chosen("layer_budget") != policy.cluster.layer_budget,
    ),
    Conflict(
        MEASURED,
        "method",
        "it chooses in each layer at once, and budgets are known only after the last",
        lambda policy: _measures_layers(policy) and _overrides(type(policy.cluster), "update_kv"),
    ),
    Conflict(
        HIDDEN_STATES,
        "layer_budget",
        "it looks at queries",
        lambda policy: policy.cluster.reads_hidden and policy.layer_budget.asks_queries,
    ),
    Conflict(BIASES, "positions", "a rotation has no channel for it"),
    Conflict(BIASES, "merge", "values are fitted already", lambda policy: policy.chosen("merge") != "none"),
    Conflict(
        BIASES,
        "cache_implementation",
        "it would be rounded with the keys; dynamic, static and offloaded work",
        lambda policy: policy.engine.cache_implementation in ("quantized", "think"),
    ),
    Conflict(DECODE_EVICTION, "cache_implementation", STORED_ONCE, _stores_once),
    Conflict(DECODE_EVICTION, "method", FITTED, _cluster("biases_keys")),
    # Keys that were noted before they moved would undo a merge, or would be taken for the method's own note.
    Conflict(MOVED_KEYS, "merge", "keys move", lambda policy: policy.chosen("merge") != "none"),
    Conflict(MOVED_KEYS, "method", "it takes notes of keys", lambda policy: _overrides(type(policy.cluster), "note")),
    Conflict(MOVED_KEYS, "method", "it uses future queries", _cluster("uses_future_positions")),
    Conflict(PREFILL_CHUNK, "cache_implementation", STORED_ONCE, _stores_once),
    Conflict(PREFILL_CHUNK, "scope", "a chunk does not know where the question begins"),
    Conflict(PREFILL_CHUNK, "ratio_of", "a chunk does not know how many vision tokens follow"),
    Conflict(
        PREFILL_CHUNK,
        "method",
        "it chooses by the whole prompt",
        lambda policy: policy.cluster.whole_prompt or policy.cluster.second_pass,
    ),
    Conflict(PREFILL_CHUNK, "layer_budget", "it is measured in the whole prompt", _measures_layers),
    Conflict(PREFILL_CHUNK, "protect", "a chunk does not know what will be kept of the prompt", _protects_prompt),
    Conflict(PREFILL_CHUNK, "positions", "it moves the keys of one prompt"),
    Conflict(
        CONTEXT_FIRST,
        "method",
        "it answers the whole prompt before it chooses",
        lambda policy: policy.cluster.second_pass == "answer",
    ),
    Conflict(CONTEXT_FIRST, "positions", "it moves the keys of one prompt"),
    Conflict(CONTEXT_FIRST, "protect", "the context does not know what will be kept of the question", _protects_prompt),
    Conflict(
        FAIR, "method", "it chooses by more than scores", lambda policy: _overrides(type(policy.cluster), *CHOICE)
    ),
    Conflict(
        FAIR,
        "head_budget",
        "heads that compete for one budget would divide each group unevenly",
        lambda policy: policy.head_budget in ADAPTIVE,
    ),
    Conflict(FAIR, "prefill_chunk", "a chunk does not know how many tokens of each span follow"),
    Conflict(
        TENSOR_PARALLEL,
        "calibration=",
        "the file is of all heads",
        lambda policy: getattr(policy.cluster, "calibration", None) is not None,
    ),
    Conflict(
        TENSOR_PARALLEL,
        "method",
        "it chooses for all heads together",
        lambda policy: policy.tokens is not None or policy.cluster.mixes_heads,
    ),
    Conflict(
        TENSOR_PARALLEL,
        "head_budget",
        "it compares heads of several processes",
        lambda policy: policy.head_budget != "uniform",
    ),
    Conflict(TENSOR_PARALLEL, "layer_budget", "it is measured over all heads", _measures_layers),
    Conflict(
        TENSOR_PARALLEL,
        "merge",
        "it compares or draws for all heads together",
        lambda policy: policy.chosen("merge") in ("cam", "weighted", "meda"),
    ),
    Conflict(PAGES, "method", "it compresses nothing", lambda policy: policy.method == "full"),
    Conflict(PAGES, "method", "it drops vision tokens, but requests are text", _drops_tokens),
    Conflict(PAGES, "head_budget", SHARED_TABLE, lambda policy: policy.head_budget in ADAPTIVE),
    Conflict(PAGES, "layer_budget", SHARED_TABLE, lambda policy: policy.chosen("layer_budget") != "uniform"),
    Conflict(PAGES, "method", "it reads the prompt twice, and the scheduler once", _cluster("second_pass")),
    Conflict(PAGES, "method", "it reads hidden states, which pages never see", _cluster("reads_hidden")),
    Conflict(PAGES, "positions", "keys would have to be rotated again"),
    Conflict(PAGES, "method", "pages have no channel for the bias of a key", _cluster("biases_keys")),
    Conflict(PAGES, "scope", "a request does not say where its question begins"),
    Conflict(PAGES, "ratio_of", "requests are text"),
    Conflict(PAGES, "protect", "pages are planned without a prompt's protected tokens"),
    Conflict(PAGES, "protect_text", "pages are planned without a prompt's protected tokens"),
    Conflict(PAGES, "fair", "pages are planned without a prompt's spans"),
    Conflict(PAGES, "first_token", "the scheduler feeds no token twice"),
    Conflict(PAGES, "prefill_chunk", "the scheduler chooses the chunks"),
    Conflict(PAGES, "cache_implementation", "the pages are the storage"),
    Conflict(SPEECH, "method", "it drops tokens of the prompt, and the talker reads all of them", _drops_tokens),
    Conflict(SPEECH, "first_token", "the talker reads the prefill's hidden states"),
    Conflict(SPEECH, "prefill_chunk", "the talker reads the hidden states of all chunks"),
)
