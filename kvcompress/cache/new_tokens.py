"""Facts about a prompt before its forward pass: lengths, padding, vision tokens, the start of the question."""

import zlib
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from ..device import fetched, on_device
from ..errors import KVCompressError
from ..policy.options import Engine
from ..policy.passages import Decoder
from ..policy.policy import Policy
from ..scoring.vision import frame_tokens, question_lengths_of, vision_token_mask
from ..scoring.windows import pad_columns
from .protected import Protected, protected_tokens


@dataclass(frozen=True)
class NewTokens:
    """The tokens of one forward pass that will be compressed: a prompt, or a second prompt on a filled cache.

    Attributes:
        columns: width of the batch.
        lengths: real tokens of each row.
        padding: LongTensor (batch, 1), the left pad columns of each row; None if no row has any.
        vision: bool (batch, columns), True at vision tokens; None if only embeddings are known.
        vision_lengths: vision tokens in each row's context; empty if `vision` is None.
        context: leading real tokens of each row that are compressed; the rest, the question, is kept.
        row_seeds: a checksum of each row's context, or of all its real tokens where it has none.
        frame_tokens: vision tokens per frame of each row, 0 if unknown, see `scoring.vision.frame_tokens`.
        question_lengths: `LayerView.question_lengths` of each row's context; empty if `vision` is None.
        source: if tokens were dropped before a layer, LongTensor (batch, left), the columns that reach the layer, -1
            where a row has fewer (`padding` then counts those).
        protected: bool (batch, columns), True at the tokens that `protect=` and `protect_text=` keep from the choice
            among the prompt's entries; None without them.
        protected_lengths: how many of each row's context; empty without it.
        lasting: what they keep from later evictions; None without them.
        groups: LongTensor (batch, columns), the group of each token that `fair=` names; None without it, and in later
            prompts.
        seen_vision: for a prompt in chunks, `vision` for all columns so far, these included: bool (batch, seen); None
            if unknown.
    """

    columns: int
    lengths: list[int]
    padding: torch.Tensor | None
    vision: torch.Tensor | None
    vision_lengths: list[int]
    context: list[int]
    row_seeds: tuple[int, ...]
    frame_tokens: tuple[int, ...] = ()
    question_lengths: tuple[int, ...] = ()
    source: torch.Tensor | None = None
    protected: torch.Tensor | None = None
    protected_lengths: tuple[int, ...] = ()
    lasting: Protected | None = None
    groups: torch.Tensor | None = None
    seen_vision: torch.Tensor | None = None

    def pads(self, columns: int, device: torch.device) -> torch.Tensor | None:
        """Return which of the last `columns` columns are pads: bool (batch, columns), or None if no row has any."""
        return None if self.padding is None else pad_columns(self.padding.to(device), columns)[:, 0]

    def columns_from(self, start: int, stop: int) -> "NewTokens":
        """Return these columns alone, as one piece of a prompt that is processed in several."""
        pads = [min(max(self.columns - length - start, 0), stop - start) for length in self.lengths]
        lengths = [stop - start - n for n in pads]
        vision, counts, questions = None, [], ()
        if self.vision is not None:
            vision = self.vision[:, start:stop]
            (here,) = fetched(vision)
            counts, questions = here.sum(1).tolist(), question_lengths_of(here, lengths)
        seen = self.seen_vision
        if seen is not None:
            seen = seen[:, : seen.shape[1] - self.columns + stop]
        padding = None if not any(pads) else on_device(pads, self.padding.device)[:, None]
        protected = None if self.protected is None else self.protected[:, start:stop]
        return replace(
            self,
            columns=stop - start,
            lengths=lengths,
            padding=padding,
            vision=vision,
            vision_lengths=counts,
            question_lengths=questions,
            context=lengths,
            seen_vision=seen,
            protected=protected,
            protected_lengths=() if protected is None else tuple(protected.sum(1).tolist()),
            groups=None if self.groups is None else self.groups[:, start:stop],
            lasting=self.lasting and self.lasting.piece(start, stop),
        )

    def question_from(self, start: int) -> "NewTokens":
        """Return the columns from `start` on, all of which are kept, as a prompt that follows its context."""
        part, none = self.columns_from(start, self.columns), [0] * len(self.lengths)
        return replace(
            part,
            context=none,
            vision_lengths=none if part.vision_lengths else [],
            question_lengths=tuple(none) if part.question_lengths else (),
            protected_lengths=tuple(none) if part.protected_lengths else (),
            groups=None,
        )

    def following(self, before: torch.Tensor | None, seen: int) -> "NewTokens":
        """Add `seen_vision`, given that of the `seen` columns before; decoded tokens among them count as text."""
        vision = self.vision
        if seen:
            known = before is not None and vision is not None
            vision = torch.cat([F.pad(before, (0, seen - before.shape[1])), vision], dim=1) if known else None
        return replace(self, seen_vision=vision)

    def vision_among(self, columns: torch.Tensor) -> dict[str, object]:
        """Return the fields of `LayerView` about vision tokens among entries of the prompt so far.

        `columns` (batch, kv_heads, entries) are as in `Kept.indices`."""
        if self.seen_vision is None:
            return {}
        seen, at = self.seen_vision.to(columns.device), columns.clamp(min=0)
        is_vision, rank = (
            known[:, None].expand(-1, at.shape[1], -1).gather(2, at) for known in (seen, seen.cumsum(1) - 1)
        )
        return {"vision": is_vision & (columns >= 0), "vision_rank": rank, "frame_tokens": self.frame_tokens}

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        policy: Policy,
        is_first: bool,
        batch: int,
        columns: int,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        video_grid_thw: torch.Tensor | None = None,
        decode: Decoder | None = None,
    ) -> "NewTokens":
        """Create the facts from the model's inputs. Waits for the device once per prompt.

        Args:
            is_first: whether the cache is empty before this prompt.
            input_ids: (batch, columns), or None.
            attention_mask: the 2-D padding mask (batch, at least columns), or None.
            video_grid_thw: frames, height and width in patches of the videos, (videos, 3), or None.
            decode: decodes token ids; only `protect_text=` needs it.
        """
        engine, mask = policy.engine, _padding_mask(attention_mask, columns)
        ids, real, grid = fetched(input_ids, mask, video_grid_thw)
        lengths = [columns] * batch if real is None else real.sum(1).tolist()
        padding = None
        if min(lengths) < columns:
            pads = columns - torch.tensor(lengths)[:, None]
            if not torch.equal(real, ~pad_columns(pads, columns)[:, 0]):
                raise KVCompressError("the attention mask is not left-padded: set padding_side='left'")
            padding = on_device(pads, mask.device)
        vision, vision_lengths, seeds = None, [], (0,) * batch
        frames: tuple[int, ...] = ()
        questions: tuple[int, ...] = ()
        if ids is not None:
            vision = vision_token_mask(config, ids)
            frames = frame_tokens(config, ids, grid)
        elif engine.ratio_of == "vision" or (engine.scope != "prompt" and engine.context_tokens is None):
            raise KVCompressError("ratio_of='vision' and scope='context' need input_ids to find images and videos")
        context = _context_lengths(engine, is_first, lengths, vision)
        if ids is not None:
            read = [n or whole for n, whole in zip(context, lengths, strict=True)]  # the question steers no choice
            seeds = tuple(
                zlib.crc32(row[columns - length : columns - length + some].tobytes())
                for row, length, some in zip(ids.numpy(), lengths, read, strict=True)
            )
        given = (each.device for each in (input_ids, attention_mask) if isinstance(each, torch.Tensor))
        place = next(given, torch.device("cpu"))
        protected = protected_tokens(policy, ids, decode, lengths, context, vision, columns, is_first, place)
        groups = None
        if policy.fair is not None and is_first:
            groups = on_device(policy.fair.groups(lengths, columns), place)
        if vision is not None:
            behind = [n - m for n, m in zip(lengths, context, strict=True)]  # of the context
            inside = vision & (torch.arange(columns) < columns - torch.tensor(behind)[:, None])
            vision_lengths = inside.sum(1).tolist()
            asking = zip(question_lengths_of(inside, lengths), behind, strict=True)
            questions = tuple(n - m for n, m in asking)
            vision = on_device(vision, input_ids.device)
        return cls(
            columns,
            lengths,
            padding,
            vision,
            vision_lengths,
            context,
            seeds,
            frames,
            questions,
            groups=groups,
            **protected,
        )


def check_past(mask: object, columns: int, seen: int, real: list[int]) -> None:
    """Raise KVCompressError if the mask of a later prompt disagrees with the mask of the `seen` columns before it.

    The cache attends to those as they came: `real` tokens of each row. The prompt has `columns` columns, and its tokens
    attend to each other causally. `mask` is 2-D, or 4-D with one head."""
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 4) or mask.shape[-1] == columns:
        return
    if mask.shape[-1] != seen + columns:
        raise KVCompressError(
            f"the attention mask has {mask.shape[-1]} columns: a prompt of {columns} on a cache that has seen {seen} "
            f"takes {seen + columns} of them, or {columns}"
        )
    if mask.ndim == 2:
        agrees = mask[:, :seen].bool().sum(1).tolist() == real
    else:
        visible = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]
        new = visible[:, -1, seen:]  # the last token sees every real one
        past = visible[..., :seen].sum(2) == torch.tensor(real, device=mask.device)[:, None]
        shown = visible[..., seen:] | ~new[:, None] | torch.ones_like(visible[..., seen:]).triu(1)
        agrees = bool((past & shown.all(2) | ~new).all())
    if not agrees:
        raise KVCompressError(
            "the attention mask hides tokens that are in the cache, or new ones from those after them, or shows pads "
            "that are not: the cache attends to what it has seen"
        )


def _padding_mask(mask: torch.Tensor | dict | None, columns: int) -> torch.Tensor | None:
    """Return bool (batch, columns), True at real tokens, from the mask that `generate` passes.

    This is a 2-D mask, or for a cache with static shapes a 4-D mask (batch, 1, queries, keys), bool or additive, or one
    per type of layer."""
    if isinstance(mask, dict):
        mask = mask.get("full_attention")
    if mask is None:
        return None
    if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[1] == 1:
        last = mask[:, 0, -1]  # the last token sees every real one
        mask = last if last.dtype == torch.bool else last == 0
    elif not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        raise KVCompressError("compression needs a 2-D attention mask (batch, tokens), left-padded, or none")
    return mask[:, -columns:].bool()


def _context_lengths(engine: Engine, is_first: bool, lengths: list[int], vision: torch.Tensor | None) -> list[int]:
    """Return the number of leading real tokens of each row that are compressed."""
    if engine.scope == "prompt":
        return lengths
    if engine.context_tokens is not None:
        if not is_first:
            return [0] * len(lengths)
        wanted = engine.context_tokens
        return [min(wanted, length) if wanted >= 0 else max(length + wanted, 0) for length in lengths]
    found = vision.any(1).tolist()
    if is_first and not all(found):
        raise KVCompressError(
            f"scope={engine.scope!r}: row {found.index(False)} has no image or video token that ends the context; "
            "give context_tokens="
        )
    return [length - asking for length, asking in zip(lengths, question_lengths_of(vision, lengths), strict=True)]
