"""The KV cache: how keys and values are compressed and stored between forward passes."""
