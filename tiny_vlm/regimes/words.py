"""The words that occur in prompts."""

from tiny_vlm.signs import PROMPT_WORDS

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
# The words of all prompts, one token each. The tokenizer of a checkpoint for the regimes is built from this list.
WORDS = (
    *PROMPT_WORDS,
    *("read", "every", "from", "left", "to", "right", "of", "picture", "which", "with", "followed", "came", "before"),
    *("was", "fact", "has"),
    *ORDINALS,
)
