"""What is asked of kvcompress in vLLM, and vLLM's other arguments: the engines whose answers are compared."""

PRUNED = {
    "unpruned": ({}, {}),
    "divprune": ({"method": "divprune", "ratio": 0.25}, {}),
    "evs": ({"method": "evs", "ratio": 0.5}, {"refuses": True}),
    "vidcom2": ({"method": "vidcom2", "ratio": 0.25}, {}),
    "dycoke": ({"method": "dycoke", "ratio": 0.6, "decode_drop": 0}, {}),
    # Media are cut by the pieces in which prompts are read, and at the second time partly read from a cache.
    "in pieces": ({"method": "divprune", "ratio": 0.5}, {"max_num_batched_tokens": 24, "max_num_seqs": 8}),
    "again": (
        {"method": "divprune", "ratio": 0.5}, {"enable_prefix_caching": True, "block_size": 32, "repeat": 2}
    ),
    "own method": ({"method": "loudest", "ratio": 0.5}, {}),
}  # fmt: skip
FEW_BLOCKS = 60  # less than all requests need, so that some are preempted
EVICTED = {
    "full": ({}, {}),
    "knorm": ({"method": "knorm", "ratio": 0.5}, {}),
    "streamingllm in pieces": (
        {"method": "streamingllm", "ratio": 0.3, "sinks": 2}, {"max_num_batched_tokens": 96, "max_num_seqs": 8}
    ),
    "keydiff again": ({"method": "keydiff", "ratio": 0.4}, {"enable_prefix_caching": True, "repeat": 2}),
    "own method": ({"method": "upwards", "ratio": 0.6}, {}),
    "preempted": ({"method": "knorm", "ratio": 0.5}, {"num_gpu_blocks_override": FEW_BLOCKS}),
}  # fmt: skip
