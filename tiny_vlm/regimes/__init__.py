"""Prompts beyond one picture and a short answer: long answers, several pictures, video, long texts.

Each file draws one regime from a `random.Random`: same seed, same prompt. `REGIMES` maps names to them.
"""

from tiny_vlm.regimes import multi_image, needle, read_all, video
from tiny_vlm.regimes.words import WORDS

REGIMES = {
    "read_all": read_all.draw,
    "multi_image": multi_image.draw,
    "video": video.draw,
    "needle": needle.draw,
}
KINDS = {  # kinds of questions, cycled through in an evaluation set; a tenth of needle's ask about the picture
    "read_all": read_all.KINDS,
    "multi_image": multi_image.KINDS,
    "video": video.KINDS,
    "needle": (*needle.KINDS * 9, "i_c2n"),
}

__all__ = ["KINDS", "REGIMES", "WORDS"]
