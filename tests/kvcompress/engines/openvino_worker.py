"""Runs in the environment of OpenVINO GenAI: `python -m tests.kvcompress.engines.openvino_worker FOLDER STEPS`.

FOLDER has a model of transformers in `model`, prompts.json with rows of token ids, and exported settings, *.json, in
`settings`. Prints, as the last line, JSON: settings' name (and `full`) -> a prompt's generated ids, their log
probabilities and the KV blocks in use at each step, or the error.
"""

import json
import sys
from pathlib import Path

import numpy
import openvino
import openvino_genai
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from kvcompress.engines.openvino import load

BLOCKS = 256
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def convert(model: Path, target: Path) -> None:
    """Convert the model, with a tokenizer that the pipeline wants and nothing here uses."""
    OVModelForCausalLM.from_pretrained(model, export=True, load_in_8bit=False, compile=False).save_pretrained(target)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    parts = convert_tokenizer(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"), with_detokenizer=True)
    for name, part in zip(("openvino_tokenizer", "openvino_detokenizer"), parts, strict=True):
        openvino.save_model(part, target / f"{name}.xml")


def answer(folder: Path, settings: Path | None, prompt: list[int], steps: int) -> dict[str, object]:
    scheduler, generation = openvino_genai.SchedulerConfig(), openvino_genai.GenerationConfig()
    if settings is not None:
        scheduler, generation = load(settings)
    scheduler.num_kv_blocks, scheduler.enable_prefix_caching = BLOCKS, False
    scheduler.max_num_batched_tokens = 4096
    generation.max_new_tokens, generation.ignore_eos, generation.logprobs = steps, True, 1
    generation.set_eos_token_id(0)
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder / "openvino"), scheduler, "CPU", EXACT)
    handle = pipeline.add_request(0, openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)), generation)
    blocks = []
    while pipeline.has_non_finished_requests():
        pipeline.step()
        blocks.append(round(pipeline.get_metrics().cache_usage * BLOCKS / 100))
    (output,) = handle.read_all()
    return {"ids": output.generated_ids, "logs": output.generated_log_probs, "blocks": blocks}


def main(folder: Path, steps: int) -> None:
    convert(folder / "model", folder / "openvino")
    prompts = json.loads((folder / "prompts.json").read_text())
    found = {}
    for settings in (None, *sorted((folder / "settings").glob("*.json"))):
        for row, prompt in enumerate(prompts):
            try:
                answered = answer(folder, settings, prompt, steps)
            except RuntimeError as error:
                answered = {"error": str(error)}
            found.setdefault("full" if settings is None else settings.stem, []).append(answered)
            print(f"{settings}, prompt {row}", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
