"""A model answers a question about a picture, with the full KV cache and with a compressed one.

python examples/picture.py --image photo.jpg --question "What does the sign say?"
"""

import argparse
import time

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import kvcompress

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="llava-hf/llava-onevision-qwen2-0.5b-ov-hf")
parser.add_argument("--image", required=True, metavar="FILE")
parser.add_argument("--question", default="Describe this picture.")
parser.add_argument("--method", default="snapkv")
parser.add_argument("--ratio", type=float, default=0.2, help="fraction of the prompt's KV entries to keep")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForImageTextToText.from_pretrained(args.model, dtype="auto").to(device)
processor = AutoProcessor.from_pretrained(args.model)
picture = Image.open(args.image).convert("RGB")
content = [{"type": "image", "image": picture}, {"type": "text", "text": args.question}]
inputs = processor.apply_chat_template(
    [{"role": "user", "content": content}],
    add_generation_prompt=True,
    tokenize=True,
    return_dict=True,
    return_tensors="pt",
).to(device, model.dtype)
model.generate(**inputs, max_new_tokens=2)  # warm-up, so that the times below are comparable

for method, ratio in (("full", None), (args.method, args.ratio)):
    with kvcompress.compress(model, method=method, ratio=ratio) as session:
        start = time.perf_counter()
        output = model.generate(**inputs, max_new_tokens=128, do_sample=False)
        seconds = time.perf_counter() - start
    answer = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{method}: KV cache {session.cache.nbytes / 2**20:.2f} MiB, {seconds:.2f} s\n{answer.strip()}\n")
