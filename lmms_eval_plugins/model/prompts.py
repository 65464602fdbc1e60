"""Convert lmms-eval's messages to model inputs with the checkpoint's own processor and chat template."""

import os
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lmms_eval.protocol import ChatMessages
from transformers import BatchFeature

from kvcompress import KVCompressError

from .arguments import ModelArguments
from .media import ChatPrompt, read_messages, resize_with_qwen_vl_utils

Shapes = tuple[tuple[int, ...], ...]  # of a prompt's images and clips


class DoNotBatch(KVCompressError):
    """Raised if a processor cannot batch images or clips of different shapes.

    Attributes:
        shapes: the shapes in each prompt.
    """

    def __init__(self, shapes: list[Shapes]):
        self.shapes = shapes
        clips = sorted({shape[0] for of_prompt in shapes for shape in of_prompt if len(shape) == 4})
        what = f"clips of {' and '.join(map(str, clips))} frames" if len(clips) > 1 else "images of different shapes"
        super().__init__(f"the processor cannot batch {what}")


def shapes_of(prompt: ChatPrompt) -> Shapes:
    """Return the shapes of a prompt's videos, (frames, height, width, 3), and images, (width, height)."""
    return tuple(video.shape for video in prompt.videos) + tuple(image.size for image in prompt.images)


class ChatProcessor:
    """Makes the prompts of a batch; touches neither the model nor the device.

    Attributes:
        processor: transformers' own; for a text-only model it is the tokenizer.
        dtype: the model's precision, to which pixels are converted.
    """

    def __init__(self, args: ModelArguments, processor: Any, dtype: torch.dtype = torch.float32):
        self.args, self.processor, self.dtype = args, processor, dtype
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.has_vision = self.tokenizer is not processor
        # Placeholders of media in a prompt, such as `<image>`; the same text in a task must not be taken for one.
        names = [name for name in vars(processor) if name.endswith("_token")] if self.has_vision else []
        self._placeholders = sorted({str(getattr(processor, name)) for name in names} - {"", "None"})

    def read(self, messages: ChatMessages | str, task: str) -> ChatPrompt:
        """Read a question's messages with their images and videos, or wrap a finished prompt. Raises KVCompressError,
        naming `task`, if a text-only model is shown media."""
        if isinstance(messages, str):
            return ChatPrompt(conversation=[], written=self._escaped(messages))
        prompt = read_messages(messages, self.args.max_frames_num, self.args.video_fps)
        if not self.has_vision and (prompt.images or prompt.videos):
            raise KVCompressError(
                f"task {task!r} shows images or videos, but {self.args.pretrained} is a text-only model"
            )
        if self.args.image_resize is not None:
            patch_size = self.processor.image_processor.patch_size
            prompt.images = [resize_with_qwen_vl_utils(image, patch_size) for image in prompt.images]
        if system := text_of(self.args.system_prompt or ""):
            others = prompt.conversation
            if others and others[0]["role"] == "system":
                others = others[1:]
            prompt.conversation = [{"role": "system", "content": [{"type": "text", "text": system}]}, *others]
        for part in chain.from_iterable(message["content"] for message in prompt.conversation):
            if part["type"] == "text":
                part["text"] = self._escaped(part["text"])
        return prompt

    def _escaped(self, text: str) -> str:
        """Escape placeholders in a task's own text: `<image>` becomes `< image>`."""
        for placeholder in self._placeholders:
            text = text.replace(placeholder, f"{placeholder[0]} {placeholder[1:]}")
        return text

    def text(self, prompt: ChatPrompt) -> str:
        """Render the prompt with the chat template, with a placeholder for each image or video.

        Raises KVCompressError if the template is wrong or refuses the conversation.
        """
        return self.templated(prompt.conversation) if prompt.written is None else prompt.written

    def templated(self, conversation: list[dict[str, Any]], starts_answer: bool = False) -> str:
        """Render a conversation, as in `ChatPrompt`, with the chat template. `starts_answer`: its last message is the
        beginning of the answer."""
        try:
            return self.processor.apply_chat_template(
                conversation if self.has_vision else _as_strings(conversation),
                tokenize=False,
                **({"continue_final_message": True} if starts_answer else {"add_generation_prompt": True}),
            )
        except Exception as error:  # a template's expressions may raise anything
            raise self._wrong_template(f"{type(error).__name__}: {error}") from error

    def _wrong_template(self, reason: str) -> KVCompressError:
        which = self.args.chat_template or f"of {self.args.pretrained}"
        return KVCompressError(f"chat template {which}: {' '.join(reason.split())}")

    def inputs(self, prompts: list[ChatPrompt]) -> BatchFeature:
        """Return the model inputs of a batch, left-padded, on the CPU. Raises DoNotBatch for images or clips that the
        processor cannot batch, and KVCompressError if the chat template does not show each image exactly once."""
        texts = [self.text(prompt) for prompt in prompts]
        arguments: dict[str, Any] = {"padding": True, "return_tensors": "pt"}
        # A chat template writes the begin-of-sequence token itself if the model needs one.
        bos = self.tokenizer.bos_token
        is_plain = self.args.chat_template == "plain"
        if prompts[0].written is not None:  # plain text, unless a template wrote it
            is_plain = not (bos and texts[0].startswith(bos))
        if not is_plain and (not self.has_vision or (bos and texts[0].startswith(bos))):
            arguments["add_special_tokens"] = False
        if any(prompt.images for prompt in prompts):
            images = [prompt.images for prompt in prompts]
            # LLaVA-OneVision's processor treats each image of a flat list as the only one of its question.
            arguments["images"] = list(chain.from_iterable(images)) if self.args.tile_every_image else images
        if any(prompt.videos for prompt in prompts):
            arguments["videos"] = [video for prompt in prompts for video in prompt.videos]
            arguments["video_metadata"] = [metadata for prompt in prompts for metadata in prompt.video_metadata]
            arguments["do_sample_frames"] = False
        try:
            inputs = dict(self.processor(text=texts, **arguments))
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            shapes = [shapes_of(prompt) for prompt in prompts]
            if len(set(shapes)) > 1 and "pixel_values" in str(error):
                raise DoNotBatch(shapes) from error
            raise self._wrong_template(f"the processor refuses its prompt: {type(error).__name__}: {error}") from error
        self._check_shown(prompts, inputs["input_ids"])
        # Frame positions are multiples of this value, so it must not be rounded to the model's precision.
        exact = {name: value for name, value in inputs.items() if name == "second_per_grid_ts"}
        return BatchFeature({**BatchFeature(inputs).to(self.dtype), **exact})

    def _check_shown(self, prompts: list[ChatPrompt], input_ids: torch.Tensor) -> None:
        """Raise KVCompressError if the template left out a prompt's images: the model would not see them."""
        names = ("image_token_id", "video_token_id")
        ids = [value for name in names if isinstance(value := getattr(self.processor, name, None), int)]
        sees = torch.isin(input_ids, torch.tensor(ids, dtype=input_ids.dtype)).any(1).tolist()
        for prompt, is_shown in zip(prompts, sees, strict=True):
            if ids and (prompt.images or prompt.videos) and prompt.written is None and not is_shown:
                raise self._wrong_template(
                    f"it leaves out the question's images: its prompt has no {' or '.join(self._placeholders)}"
                )


def on_device(inputs: BatchFeature, device: torch.device) -> BatchFeature:
    """Return a copy of the inputs on a device."""
    return BatchFeature(dict(inputs)).to(device)


def text_of(text_or_file: str) -> str:
    """Return the text of an argument that is either the text itself or a file with it."""
    return Path(text_or_file).read_text(encoding="utf-8").strip() if os.path.isfile(text_or_file) else text_or_file


def _as_strings(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join content parts into strings, which many templates of text-only models expect."""
    return [{**message, "content": "".join(part["text"] for part in message["content"])} for message in conversation]
