"""Generate long multimodal prompts from a seed: needles among many pictures, and documents of many pages.

`python -m lmms_eval_plugins.long_pack --out DIR` writes them as lmms-eval tasks of any size; see docs/long-pack.md.
Needles follow MM-NIAH (arXiv 2406.07230) and MileBench (arXiv 2404.18532), questions about documents MMLongBench-Doc
(arXiv 2407.01523). All texts and pictures are generated here; no data of theirs is used.
"""
