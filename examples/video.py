"""A model answers a question about a video, with the full KV cache and with a compressed one.

python examples/video.py --video clip.mp4 --question "What happens in this video?"
"""

import argparse
import time

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.video_utils import load_video

import kvcompress

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="Qwen/Qwen3-VL-4B-Instruct")
parser.add_argument("--video", required=True, metavar="FILE")
parser.add_argument("--frames", type=int, default=32, help="spread evenly over the video")
parser.add_argument("--question", default="Describe this video.")
parser.add_argument("--method", default="snapkv")
parser.add_argument("--ratio", type=float, default=0.2, help="fraction of the prompt's KV entries to keep")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForImageTextToText.from_pretrained(args.model, dtype="auto").to(device)
processor = AutoProcessor.from_pretrained(args.model)
frames, metadata = load_video(args.video, num_frames=args.frames, backend="pyav")  # pip install av
content = [{"type": "video", "video": frames}, {"type": "text", "text": args.question}]
inputs = processor.apply_chat_template(
    [{"role": "user", "content": content}],
    add_generation_prompt=True,
    tokenize=True,
    return_dict=True,
    return_tensors="pt",
    processor_kwargs={"do_sample_frames": False, "video_metadata": metadata},
).to(device, model.dtype)
model.generate(**inputs, max_new_tokens=2)  # warm-up, so that the times below are comparable

for method, ratio in (("full", None), (args.method, args.ratio)):
    with kvcompress.compress(model, method=method, ratio=ratio) as session:
        start = time.perf_counter()
        output = model.generate(**inputs, max_new_tokens=128, do_sample=False)
        seconds = time.perf_counter() - start
    answer = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{method}: KV cache {session.cache.nbytes / 2**20:.2f} MiB, {seconds:.2f} s\n{answer.strip()}\n")
