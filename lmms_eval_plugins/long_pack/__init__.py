"""Long multimodal prompts, drawn from a seed: needles among many pictures, documents of many pages.

`python -m lmms_eval_plugins.long_pack --out DIR` writes them as lmms-eval tasks of any size; see docs/long-pack.md.
Needles are posed as MM-NIAH (arXiv 2406.07230) and MileBench (arXiv 2404.18532) pose them, questions about documents as
MMLongBench-Doc (arXiv 2407.01523) does. All texts and pictures are generated here; nothing of those data sets is used.
"""
