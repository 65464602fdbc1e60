"""A tokenizer with one token per character, and a chat template, for tiny checkpoints; without lmms-eval."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.families import FIRST_TEXT, VOCAB_SIZE

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}MEDIA{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
QWEN_SPECIALS = [
    "<pad>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<eos>", "<unk>", "<7>",
]  # fmt: skip


def character_tokenizer(specials: list[str], **named: str) -> PreTrainedTokenizerFast:
    """Create a tokenizer with one token per character of printable ASCII, after the special tokens of families.py (0 to
    7).

    `named` tokens become attributes of the tokenizer."""
    characters = ["\n", *map(chr, range(32, 127)), *"äöüéèàçñøåßœ"]
    vocabulary = [*specials[:FIRST_TEXT], *characters]
    vocabulary += [f"<{i}>" for i in range(len(vocabulary), VOCAB_SIZE)]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=named or specials[1:5],
    )
