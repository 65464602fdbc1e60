"""vLLM's Qwen2.5-VL and Qwen3-VL, whose pictures and videos are pruned when they are encoded.

vLLM counts on a placeholder for each token that stays, written by the processor, and on positions from the model. Both
come from `MediaPruner`: the processor knows how many tokens stay, the encoded tokens say which.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.models.qwen2_5_vl import (
    Qwen2_5_VLDummyInputsBuilder,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLMultiModalProcessor,
    Qwen2_5_VLProcessingInfo,
)
from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMultiModalProcessor,
    Qwen3VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.multimodal.processing import PromptReplacement

from .media import MediaPruner

DUMMY_FRAMES = 64  # enough for a method that keeps a video's first frame
PLACES = 6  # channels behind an embedding: its position in time, height, width, each as multiples of BYTE and the rest
BYTE = 256  # integers up to it are exact in bfloat16


def pruner_of(config: Any) -> MediaPruner:
    """Return the pruner that a model's configuration asks for."""
    return MediaPruner.of(**config.kvcompress)


def media_ids(config: Any) -> dict[str, int]:
    return {"image": config.image_token_id, "video": config.video_token_id}


def counts(config: Any, modality: str, grid: Sequence[int]) -> tuple[int, int | None]:
    """Return a medium's vision tokens before any is pruned, and how many frames they are; None for a picture."""
    tokens = math.prod(map(int, grid)) // config.vision_config.spatial_merge_size**2
    return tokens, int(grid[0]) if modality == "video" else None


class PruningProcessor:
    """Mixed into a processor of vLLM: it writes a placeholder for each token that stays."""

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any) -> list:
        config = self.info.get_hf_config()
        pruner = pruner_of(config)

        def placeholders(index: int, modality: str) -> list[int]:
            item = out_mm_kwargs[modality][index]
            tokens, frames = counts(config, modality, item[f"{modality}_grid_thw"].data)
            pruner.rehearse(tokens, frames)
            count = pruner.kept(tokens, modality == "video") + self._text_within(modality, item)
            return [media_ids(config)[modality]] * count

        return [
            PromptReplacement(modality=modality, target=[token], replacement=partial(placeholders, modality=modality))
            for modality, token in media_ids(config).items()
        ]

    def _text_within(self, modality: str, item: Any) -> int:
        """Return how many tokens of text are part of a medium."""
        return 0


class ManyFrames:
    """Mixed into vLLM's builder of the inputs by which it measures memory: videos of more and smaller frames."""

    def _get_dummy_videos(self, *, width: int, height: int, num_frames: int, **rest: Any) -> list:
        smaller = math.sqrt(max(DUMMY_FRAMES / num_frames, 1))
        sides = {"width": max(int(width / smaller), 1), "height": max(int(height / smaller), 1)}
        return super()._get_dummy_videos(**sides, num_frames=max(num_frames, DUMMY_FRAMES), **rest)


class Pruned:
    """Mixed into a model of vLLM: it encodes only the tokens that stay, and gives them the positions that they had."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:  # vLLM looks for these names
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.pruner = pruner_of(self.config)

    def _whole(self, modality: str, grid: Sequence[int], timestamps: Sequence[float] | None) -> list[int]:
        """Return a medium's token ids if none is pruned."""
        return [media_ids(self.config)[modality]] * counts(self.config, modality, grid)[0]

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """Return positions (3, tokens) and how much further decoding goes on, both as if nothing was pruned.

        Those of vision tokens are not theirs before it is known which stay."""
        tokens, features, columns, at = [], [], [], 0

        def copy_text(end: int) -> None:
            columns.extend(range(len(tokens), len(tokens) + end - at))
            tokens.extend(input_tokens[at:end])

        for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset):
            place, data = feature.mm_position, feature.data
            copy_text(place.offset)
            timestamps = data["timestamps"].data if "timestamps" in data else None
            whole = self._whole(feature.modality, data[f"{feature.modality}_grid_thw"].data.tolist(), timestamps)
            features.append(replace(feature, mm_position=PlaceholderRange(len(tokens), len(whole))))
            tokens.extend(whole)
            columns.extend(range(len(tokens) - place.length, len(tokens)))
            at = place.offset + place.length
        copy_text(len(input_tokens))
        positions, _ = super().get_mrope_input_positions(tokens, features)
        return positions[:, columns], int(positions.max()) + 1 - len(input_tokens)

    def recompute_mrope_positions(
        self,
        input_ids: list[int] | torch.Tensor,
        multimodal_embeddings: Sequence[torch.Tensor],
        mrope_positions: torch.Tensor,
        num_computed_tokens: int,
    ) -> tuple[list[torch.Tensor], torch.Tensor, int]:
        """Give the vision tokens of a prompt, from `num_computed_tokens` on, the positions behind their embeddings.

        Returns the embeddings without them, all positions (3, tokens), and how much further decoding goes on."""
        further = int(mrope_positions.max()) + 1 - len(input_ids)
        if not multimodal_embeddings:
            return [], mrope_positions, further
        ids = torch.as_tensor(input_ids, device=mrope_positions.device)
        is_media = torch.isin(ids, ids.new_tensor(list(media_ids(self.config).values())))
        places = torch.cat([states[:, -PLACES:] for states in multimodal_embeddings]).long().to(ids.device)
        own = (places[:, :3] * BYTE + places[:, 3:]).T
        columns = is_media.nonzero()[:, 0]
        columns = columns[columns >= num_computed_tokens][: own.shape[1]]
        text = torch.arange(len(ids), device=ids.device).masked_fill(is_media, -1).cummax(0).values[columns]
        begin = torch.where(text < 0, 0, mrope_positions[0, text.clamp(min=0)] + 1)
        positions = mrope_positions.clone()
        positions[:, columns] = (begin + own).to(positions.dtype)
        return [states[:, :-PLACES] for states in multimodal_embeddings], positions, further

    def _postprocess_image_embeds_evs(self, embeds: Sequence[torch.Tensor], inputs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(map(partial(self._prune, "image"), embeds, inputs["image_grid_thw"].tolist()))

    def _postprocess_video_embeds_evs(self, embeds: Sequence[torch.Tensor], inputs: Any) -> tuple[torch.Tensor, ...]:
        grids, seconds = inputs["video_grid_thw"].tolist(), inputs.get("second_per_grid_ts")
        seconds = [None] * len(grids) if seconds is None else list(seconds)
        timestamps = inputs.get("timestamps") or [None] * len(grids)
        return tuple(map(partial(self._prune, "video"), embeds, grids, seconds, timestamps))

    def _prune(
        self,
        modality: str,
        states: torch.Tensor,
        grid: list[int],
        seconds: torch.Tensor | None = None,
        timestamps: Sequence[float] | None = None,
    ) -> torch.Tensor:
        """Return the embeddings that stay of a medium, and of the text within it, with their places behind them.

        `states` is (tokens, channels): the embedding, then what a model adds to deeper layers."""
        size = self.config.text_config.hidden_size
        _, frames = counts(self.config, modality, grid)
        stays, merged = self.pruner.prune(states[:, :size], frames)
        kept = torch.cat([merged, states[:, size:]], dim=1)[stays]
        whole = torch.tensor(self._whole(modality, grid, timestamps), device=states.device)
        is_vision = whole == media_ids(self.config)[modality]
        left = ~is_vision
        left[is_vision] = stays
        embeddings = kept.new_zeros(int(left.sum()), kept.shape[1])
        embeddings[is_vision[left]] = kept
        if not is_vision.all():
            text = self.get_language_model().embed_input_ids(whole[~is_vision])
            embeddings[~is_vision[left]] = F.pad(text, (0, kept.shape[1] - size)).to(kept.dtype)
        positions = self._positions(modality, whole.tolist(), grid, seconds).to(states.device)[:, left].T
        places = torch.cat([positions // BYTE, positions % BYTE], dim=1)
        return torch.cat([embeddings, places.to(kept.dtype)], dim=1)

    def _positions(self, modality: str, whole: list[int], grid: list[int], seconds: Any) -> torch.Tensor:
        """Return the positions (3, tokens) of a medium, relative to its first token."""
        data = {f"{modality}_grid_thw": torch.tensor(grid)}
        if seconds is not None:
            data["second_per_grid_ts"] = torch.as_tensor(seconds)
        field = MultiModalFieldConfig.batched(modality).field
        item = MultiModalKwargsItem(
            {name: MultiModalFieldElem(data=value, field=field) for name, value in data.items()}
        )
        place = PlaceholderRange(offset=0, length=len(whole))
        feature = MultiModalFeatureSpec(data=item, modality=modality, identifier="", mm_position=place)
        return super().get_mrope_input_positions(whole, [feature])[0]


class Qwen2_5_VLProcessor(PruningProcessor, Qwen2_5_VLMultiModalProcessor):
    """Qwen2.5-VL's processor with a placeholder for each token that stays."""


class Qwen2_5_VLDummyInputs(ManyFrames, Qwen2_5_VLDummyInputsBuilder):
    """Qwen2.5-VL's inputs to measure memory."""


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5_VLProcessor, info=Qwen2_5_VLProcessingInfo, dummy_inputs=Qwen2_5_VLDummyInputs
)
class PrunedQwen2_5_VL(Pruned, Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL that prunes."""


def laid_out(frames: int, timestamps: Sequence[float], tokenizer: Any, config: Any, per_frame: int) -> list[int]:
    """Return the ids of a video of Qwen3-VL: each frame's time and marks, and `per_frame` vision tokens."""
    return Qwen3VLMultiModalProcessor.get_video_repl(
        tokens_per_frame=[per_frame] * frames,
        timestamps=timestamps,
        tokenizer=tokenizer,
        vision_start_token_id=config.vision_start_token_id,
        vision_end_token_id=config.vision_end_token_id,
        video_token_id=config.video_token_id,
    ).full


class Qwen3VLProcessor(PruningProcessor, Qwen3VLMultiModalProcessor):
    """Qwen3-VL's processor with a placeholder for each token that stays, and for the text between frames."""

    def _text_within(self, modality: str, item: Mapping[str, Any]) -> int:
        if modality == "image":
            return 0
        timestamps = item["timestamps"].data
        return len(laid_out(len(timestamps), timestamps, self.info.get_tokenizer(), self.info.get_hf_config(), 0))


class Qwen3VLDummyInputs(ManyFrames, Qwen3VLDummyInputsBuilder):
    """Qwen3-VL's inputs to measure memory."""


@MULTIMODAL_REGISTRY.register_processor(Qwen3VLProcessor, info=Qwen3VLProcessingInfo, dummy_inputs=Qwen3VLDummyInputs)
class PrunedQwen3VL(Pruned, Qwen3VLForConditionalGeneration):
    """Qwen3-VL that prunes."""

    def _whole(self, modality: str, grid: Sequence[int], timestamps: Sequence[float] | None) -> list[int]:
        if modality == "image":
            return super()._whole(modality, grid, timestamps)
        tokens, frames = counts(self.config, modality, grid)
        return laid_out(frames, timestamps, self._tokenizer, self.config, tokens // frames)
