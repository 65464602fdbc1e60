"""A model of the Qwen-VL family answers several questions about one picture, which is read and compressed once.

python examples/several_questions.py --image photo.jpg --questions "What is this?" "What colours are in it?"
"""

import argparse
import time

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import kvcompress

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="Qwen/Qwen2.5-VL-3B-Instruct")
parser.add_argument("--image", required=True, metavar="FILE")
parser.add_argument("--questions", nargs="+", default=["What is in this picture?", "Is there any text in it?"])
parser.add_argument("--method", default="kvzip", help="kvzip (default) suits questions that are not known in advance")
parser.add_argument("--ratio", type=float, default=0.3, help="fraction of the picture's KV entries to keep")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForImageTextToText.from_pretrained(args.model, dtype="auto").to(device)
processor = AutoProcessor.from_pretrained(args.model)
picture = Image.open(args.image).convert("RGB")
prompts = [
    processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": question}]}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    ).to(device, model.dtype)
    for question in args.questions
]
# The prompts' common part ends with the picture.
end = (prompts[0]["input_ids"][0] == model.config.vision_end_token_id).nonzero()[-1] + 1
per_token = ("input_ids", "attention_mask", "mm_token_type_ids")
context = {name: value[:, :end] if name in per_token else value for name, value in prompts[0].items()}
model.generate(**prompts[0], max_new_tokens=2)  # warm-up, so that the times below are comparable

for method, ratio in (("full", None), (args.method, args.ratio)):
    with torch.no_grad(), kvcompress.compress(model, method=method, ratio=ratio) as session:
        start = time.perf_counter()
        model(**context, logits_to_keep=1)
        answers = []
        for prompt in prompts:
            ids, mask = prompt["input_ids"], prompt["attention_mask"]
            with session.reuse() as cache:  # leaves the cache as it was
                output = model.generate(
                    ids, attention_mask=mask, past_key_values=cache, max_new_tokens=128, do_sample=False
                )
            answers.append(processor.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip())
        seconds = time.perf_counter() - start
    print(f"{method}: KV cache {session.cache.nbytes / 2**20:.2f} MiB, {seconds:.2f} s", *answers, "", sep="\n")
