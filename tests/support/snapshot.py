"""Everything that compression could leave behind on a model."""

import torch


def snapshot(model: torch.nn.Module) -> list:
    """Return every attribute name and hook of every module, and the attention implementations."""
    modules = [
        (name, sorted(module.__dict__), len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
    ]
    configs = [model.config, *(getattr(model.config, key) for key in model.config.sub_configs)]
    return [modules, [config._attn_implementation for config in configs], model.config.to_dict()]
