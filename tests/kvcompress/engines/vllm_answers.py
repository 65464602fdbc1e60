"""Answer the prompts of `tiny_qwen` with vLLM.

python -m tests.kvcompress.engines.vllm_answers CHECKPOINT RESULT ENGINE...

ENGINE is a JSON object of vLLM's arguments, and `repeat`, how often to ask, and `refuses`, whether to ask for a video
that is too short before. RESULT gets, for each, the prompts' lengths and the answers' tokens."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {  # before vLLM is imported
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}

from tests.kvcompress.engines.tiny_qwen import ANSWER, prompts, short_video


def answers(checkpoint: str, **arguments: Any) -> list[dict[str, Any]]:
    """Answer all prompts in one call, so that many are in flight."""
    from vllm import LLM, SamplingParams

    limits = {"limit_mm_per_prompt": {"image": 2, "video": 2}, "max_model_len": 1024, "enforce_eager": True}
    repeat, refuses = arguments.pop("repeat", 1), arguments.pop("refuses", False)
    engine = LLM(checkpoint, dtype="float32", **{**limits, "enable_prefix_caching": False, **arguments})
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    if refuses:
        try:
            engine.generate(short_video(), sampling, use_tqdm=False)
        except ValueError as error:
            print("refused:", error, file=sys.stderr)
        else:
            raise SystemExit("a video that is too short was answered")
    for _ in range(repeat):
        outputs = engine.generate(prompts(), sampling, use_tqdm=False)
    return [{"prompt": len(one.prompt_token_ids), "answer": list(one.outputs[0].token_ids)} for one in outputs]


if __name__ == "__main__":
    found = [answers(sys.argv[1], **json.loads(engine)) for engine in sys.argv[3:]]
    Path(sys.argv[2]).write_text(json.dumps(found))
