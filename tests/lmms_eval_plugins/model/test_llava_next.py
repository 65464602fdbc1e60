"""Checkpoints in the original LLaVA-NeXT layout load as transformers' LLaVA-OneVision."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from kvcompress import KVCompressError
from lmms_eval_plugins.model import llava_next
from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT
from lmms_eval_plugins.model.lm import KVCompressLM
from tests.support import llava_next_layout
from tests.support.checkpoints import image, requests, write_video


@pytest.fixture(scope="module")
def reference():
    """The bundled model with random weights, in fp32, so that no weight is equal to another by chance."""
    model = AutoModelForImageTextToText.from_pretrained(TINY_CHECKPOINT, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.02)
    return model


@pytest.fixture(scope="module")
def original(reference, tmp_path_factory):
    """The reference saved as LLaVA-NeXT saves: its names, its config, two shards."""
    folder = tmp_path_factory.mktemp("llava_qwen")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_CHECKPOINT / name, folder)
    llava_next_layout.save(reference, folder)
    return folder


@pytest.fixture(autouse=True)
def tiny_tower(reference):
    with llava_next_layout.knows_the_tower(reference):
        yield


def load(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    assert llava_next.is_llava_next(config)
    processor = llava_next.load_processor(str(folder), config)
    return llava_next.load_model(str(folder), config, processor.tokenizer, dtype="auto").eval(), processor


def test_logits_equal_those_of_the_same_weights_in_transformers_layout(reference, original):
    model, processor = load(original)
    assert model.dtype == torch.float32
    prompt = "<|im_start|>user\n<image>\nwhat word is on the red sign?<|im_end|>"
    theirs = AutoProcessor.from_pretrained(TINY_CHECKPOINT)
    for picture in (image(0, 192, 96), image(1, 100, 300)):  # anyres grids of two shapes
        expected = theirs(text=prompt, images=picture, return_tensors="pt")
        inputs = processor(text=prompt, images=picture, return_tensors="pt")
        assert torch.equal(inputs["input_ids"], expected["input_ids"])
        assert torch.equal(inputs["pixel_values"], expected["pixel_values"])
        with torch.no_grad():
            assert torch.equal(model(**inputs).logits, reference(**expected).logits)


@pytest.mark.slow
def test_an_evaluation_answers_as_in_transformers_layout(reference, original, tmp_path):
    folder, template = tmp_path / "transformers", tmp_path / "template.jinja"
    reference.save_pretrained(folder)
    AutoProcessor.from_pretrained(TINY_CHECKPOINT).save_pretrained(folder)
    template.write_text(llava_next.CHAT_TEMPLATE)
    docs = [
        {"text": "hello"},
        {"text": "what word is on the red sign?", "images": [image(0, 192, 96)]},
        {"text": "which of the two?", "images": [image(1), image(2, 64, 64)]},
        {"text": "what happens?", "videos": [write_video(tmp_path / "a.mp4")]},
    ]
    cell = {"method": "snapkv", "ratio": 0.5, "window_size": 4, "batch_size": 4, "max_new_tokens": 8}
    answers = []
    for pretrained in (folder, original):
        lm = KVCompressLM(
            pretrained=str(pretrained), chat_template=str(template), device="cpu", dtype="float32", **cell
        )
        answers.append([result.text for result in lm.generate_until(requests(lm, docs))])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == len(docs)


def test_prompt_is_the_originals_conversation(original):
    processor = llava_next.load_processor(str(original), json.loads((original / "config.json").read_text()))
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    assert processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<image>\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_image_is_cut_into_at_most_as_many_tiles_as_the_checkpoint_says(original):
    config = json.loads((original / "config.json").read_text()) | {"image_aspect_ratio": "anyres_max_4"}
    processor = llava_next.load_processor(str(original), config)
    assert processor.vision_aspect_ratio == "anyres_max_4"
    assert llava_next.convert_config(config, processor.tokenizer).vision_aspect_ratio == "anyres_max_4"


def test_a_missing_weight_is_an_error(original, tmp_path):
    folder = shutil.copytree(original, tmp_path / "incomplete")
    shard = folder / "model-00001-of-00002.safetensors"
    weights = load_file(shard)
    lost = next(name for name in weights if "layers.0" in name)
    save_file({name: tensor for name, tensor in weights.items() if name != lost}, shard, metadata={"format": "pt"})
    with pytest.raises(KVCompressError, match="missing_keys"):
        load(folder)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("mm_projector_type", "linear"),
        ("mm_newline_position", "grid"),
        ("mm_vision_select_layer", -1),
        ("image_aspect_ratio", "pad"),
        ("mm_vision_tower", "openai/clip-vit-large-patch14-336"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ],
)
def test_a_setting_that_transformers_lacks_is_an_error_that_names_it(original, setting, value):
    with pytest.raises(KVCompressError, match=setting):
        load(original, **{setting: value})


def test_published_7b_config_maps_to_the_shapes_of_the_hub_conversion(original):
    """The values of lmms-lab/llava-onevision-qwen2-7b-ov against those of llava-hf/llava-onevision-qwen2-7b-ov-hf."""
    processor = llava_next.load_processor(str(original), json.loads((original / "config.json").read_text()))
    config = {
        "model_type": "llava_qwen",
        "image_aspect_ratio": "anyres_max_9",
        "image_grid_pinpoints": "(1x1),...,(6x6)",
        "mm_vision_tower": "google/siglip-so400m-patch14-384",
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }
    converted = llava_next.convert_config(config, processor.tokenizer)
    text, vision = converted.text_config, converted.vision_config
    assert (text.hidden_size, text.num_hidden_layers, text.num_key_value_heads) == (3584, 28, 4)
    assert text.rope_parameters["rope_theta"] == 1000000.0
    assert not text.use_sliding_window
    assert (vision.num_hidden_layers, vision.image_size, vision.patch_size) == (26, 384, 14)
    assert not vision.vision_use_head
    assert (converted.vision_feature_layer, converted.vision_aspect_ratio) == (-1, "anyres_max_9")
    tiles = [384 * i for i in range(1, 7)]
    assert sorted(converted.image_grid_pinpoints) == [[h, w] for h in tiles for w in tiles]
    config["image_grid_pinpoints"] = [[384, 768], [1152, 384]]  # width, height
    found = llava_next.convert_config(config, processor.tokenizer)
    assert found.image_grid_pinpoints == [[768, 384], [384, 1152]]
