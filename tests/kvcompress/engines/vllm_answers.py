"""Answer the prompts of `tiny_qwen` with vLLM.

python -m tests.kvcompress.engines.vllm_answers CHECKPOINT RESULT ENGINE...

ENGINE is a JSON object of vLLM's arguments, and `repeat`, how often to ask, `refuses`, whether to ask for a video that
is too short before, and `long`, whether to ask the long prompts. RESULT gets, for each, the prompts' lengths and the
answers' tokens; of long prompts also `blocks`, how many vLLM's metric says are in use after each step."""

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

from tests.kvcompress.engines.tiny_qwen import ANSWER, long_prompts, prompts, short_video


def answers(checkpoint: str, **arguments: Any) -> list[dict[str, Any]]:
    """Answer all prompts in one call, so that many are in flight."""
    from vllm import LLM, SamplingParams

    limits = {"limit_mm_per_prompt": {"image": 2, "video": 2}, "max_model_len": 1024, "enforce_eager": True}
    repeat, refuses, is_long = arguments.pop("repeat", 1), arguments.pop("refuses", False), arguments.pop("long", False)
    if is_long:
        limits |= {"disable_log_stats": False}
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
        if is_long:
            outputs, blocks = in_steps(engine, sampling)
        else:
            outputs = engine.generate(prompts(), sampling, use_tqdm=False)
    if is_long:
        return [
            {"prompt": len(one.prompt_token_ids), "answer": list(one.outputs[0].token_ids), "blocks": blocks}
            for one in outputs
        ]
    return [{"prompt": len(one.prompt_token_ids), "answer": list(one.outputs[0].token_ids)} for one in outputs]


def in_steps(engine: Any, sampling: Any) -> tuple[list[Any], list[int]]:
    """Answer the long prompts, all in flight; return vLLM's outputs, and the blocks in use after each step."""
    for number, prompt in enumerate(long_prompts()):
        engine.llm_engine.add_request(str(number), prompt, sampling)
    finished, blocks = {}, []
    total = engine.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1  # the null block is not counted
    while engine.llm_engine.has_unfinished_requests():
        finished |= {int(one.request_id): one for one in engine.llm_engine.step() if one.finished}
        (usage,) = [metric.value for metric in engine.get_metrics() if metric.name == "vllm:kv_cache_usage_perc"]
        blocks.append(round(usage * total))
    return [finished[number] for number in sorted(finished)], blocks


if __name__ == "__main__":
    found = [answers(sys.argv[1], **json.loads(engine)) for engine in sys.argv[3:]]
    Path(sys.argv[2]).write_text(json.dumps(found))
