"""Gumpest/SparseVLMs, version 1.5 (the default of its environment): the forward pass of its LLaMA, with its choice,
recycling and clustering."""

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from .token_recording import Prompt, Recordings, TokenRecording, released, run, through

BEFORE, IMAGES, QUESTION, LAYERS = 5, 576, 20, 32

ours = through


class Layer:
    """A decoder layer that changes nothing, attends by the released function and notes what reaches it."""

    def __init__(self, prompt: Prompt, place: int, attend):
        self.prompt, self.place, self.attend, self.mlp = prompt, place, attend, mock.MagicMock()
        self.mlp.up_proj.out_features = 1

    def __call__(self, hidden_states, policy, **_):
        self.hidden, weights = hidden_states, None
        if policy is None:
            queries, keys = self.prompt.queries_and_keys(self.place, hidden_states)
            _, weights = self.attend(queries, keys, keys, is_causal=True)
        return hidden_states, None, weights


def recordings(checkout: Path) -> Recordings:
    folder = checkout / "llava/model/language_model"
    for seed, retained in enumerate((192, 128, 96, 64)):
        os.environ["RETAIN_TOKN"] = str(retained)
        names = {"torch": torch, "BaseModelOutputWithPast": SimpleNamespace, "Cache": SimpleNamespace}
        names["_prepare_4d_causal_attention_mask_for_sdpa"] = lambda *_: None
        for part in ("score", "utils"):
            spec = importlib.util.spec_from_file_location(part, folder / f"{part}.py")
            spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
            names.update(vars(module))
        forward = released(folder / "modelling_sparse_llama.py", "LlamaDynamicvitModel.forward", names)
        drawn = {
            "seed": 100 * seed, "layers": LAYERS, "before": BEFORE, "images": IMAGES, "behind": QUESTION, "size": 4,
        }  # fmt: skip
        prompt = Prompt.draw(**drawn)
        layers = [Layer(prompt, place, names["scaled_dot_product_attention"]) for place in range(LAYERS)]
        model = mock.MagicMock(layers=layers, pruning_loc=[2, 6, 15], num_layers=LAYERS, training=False)
        model.norm, model.init_token_total_shape, model.generate_process_count = lambda hidden: hidden, 664, 0
        model._use_flash_attention_2, model.gradient_checkpointing, model.num_forward = False, False, 0
        model.all_FLOPs = model.num_token_pool = model.total_cuda_time = 0
        # Noise tells equal densities apart, as those of two tokens that are each other's nearest: let it favour the
        # earlier.
        noise = mock.patch("torch.rand", lambda shape, **_: torch.linspace(1, 0, shape[-1]).expand(shape))
        with noise, mock.patch("torch.cuda.Event") as event, mock.patch("torch.cuda.synchronize"):
            event().elapsed_time.return_value = 0.0
            cache = SimpleNamespace(get_usable_length=lambda *_: 0)
            options = {"output_attentions": False, "output_hidden_states": False, "use_cache": True}
            forward(
                model, None, None, None, cache, prompt.hidden, **options, return_dict=True, image_shape=IMAGES,
                pre_prompt_length_list=[BEFORE],
            )  # fmt: skip
        states = [layers[place].hidden[0, BEFORE:-QUESTION] for place in (3, 7, 16)]
        counts = names["sparse_token_dict"][retained]
        label = "sparsevlm" if retained == 192 else f"sparsevlm, {retained}"
        options = {} if retained == 192 else {"counts": counts}
        yield TokenRecording(label, "sparsevlm", options, drawn, retained, states)


if __name__ == "__main__":
    functions = "modelling_sparse_llama.py: LlamaDynamicvitModel.forward; score.py, utils.py"
    run(recordings, "Gumpest/SparseVLMs", functions)
