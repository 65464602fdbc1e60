"""The cache strategies and a model's parts by name, without the code that creates them."""

from dataclasses import dataclass, replace

PARTS = {
    "vision": "the vision tower",
    "audio": "the audio tower, which hears",
    "speech": "talker and token2wav, which speak",
}


@dataclass(frozen=True)
class Kind:
    """A kind of cache strategy.

    Attributes:
        compresses: whether our method compresses the cache.
        is_static: whether the thinker's shapes are fixed.
        overlaps: whether the talker starts with the first text tokens.
    """

    compresses: bool = False
    is_static: bool = False
    overlaps: bool = False


AFTER_THE_TEXT = {
    "dynamic": Kind(),
    "static": Kind(is_static=True),
    "compressed": Kind(compresses=True),
    "compressed-static": Kind(compresses=True, is_static=True),
}
STRATEGIES = AFTER_THE_TEXT | {f"{name}-overlap": replace(kind, overlaps=True) for name, kind in AFTER_THE_TEXT.items()}
