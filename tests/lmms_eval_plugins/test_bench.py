"""`kvcompress bench` where the bundled model is installed."""

from kvcompress.bench import comparison
from kvcompress.bench.shapes import SHAPES, source
from lmms_eval_plugins import bench
from lmms_eval_plugins.model.arguments import TINY_CHECKPOINT


def test_tiny_is_the_bundled_model_and_as_a_shape_the_shape_of_that_name(monkeypatch):
    measured = []
    monkeypatch.setattr(
        comparison, "measure", lambda given, arguments: measured.append(source(given.model, given.shape))
    )
    bench.main(["tiny"])
    bench.main(["--shape", "tiny"])
    assert measured == [{"pretrained": str(TINY_CHECKPOINT)}, {"config": SHAPES["tiny"]}]
