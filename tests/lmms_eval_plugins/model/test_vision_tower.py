"""The vision tower's calls, as they are noted for other cells."""

from lmms_eval_plugins.model.vision_tower import VisionTower
from tests.support.checkpoints import image, load_lm, requests


def test_the_towers_hidden_states_do_not_stay_in_memory(checkpoint):
    lm = load_lm(checkpoint("qwen3-vl"))
    batch = lm.prepare(requests(lm, [{"text": "?", "images": [image(0)]}]))
    with VisionTower(lm.model, {}) as tower:
        output = lm.model.base_model.get_image_features(batch.inputs["pixel_values"], batch.inputs["image_grid_thw"])
    (encoded,) = tower.calls.values()
    for seen in (output, encoded.output):
        assert seen.get("last_hidden_state") is None
        assert seen.get("hidden_states") is None
        assert len(seen.deepstack_features) == 2
    assert "get_image_features" not in vars(lm.model.base_model)


def test_a_video_is_one_call_where_it_is_encoded_as_images(checkpoint, video):
    """Else its seconds would count twice."""
    lm = load_lm(checkpoint("qwen3-vl"))
    inputs = lm.prepare(requests(lm, [{"text": "what happens?", "videos": [video]}])).inputs
    with VisionTower(lm.model, {}) as tower:
        lm.model.base_model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"])
    assert list(tower.calls) == [("video", 0)]
    assert tower.seconds == tower.spent_s
