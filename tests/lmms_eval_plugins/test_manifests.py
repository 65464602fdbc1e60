"""lmms-eval finds the model through the entry point."""

import pkgutil
import subprocess
import sys
from importlib.metadata import entry_points


def test_entry_point_gives_a_chat_model_that_lmms_eval_accepts():
    from lmms_eval.models import MODEL_REGISTRY_V2

    from lmms_eval_plugins.model.lm import KVCompressLM

    assert "kvcompress" in [point.name for point in entry_points(group="lmms_eval.models")]
    assert MODEL_REGISTRY_V2.resolve("kvcompress").model_type == "chat"
    assert MODEL_REGISTRY_V2.get_model_class("kvcompress") is KVCompressLM


def test_the_manifest_names_the_model_class():
    from lmms_eval_plugins.manifests import manifests
    from lmms_eval_plugins.model.lm import KVCompressLM

    (manifest,) = manifests()
    assert pkgutil.resolve_name(manifest.chat_class_path) is KVCompressLM


def test_manifests_import_neither_torch_nor_transformers():
    code = "import sys; from lmms_eval_plugins.manifests import manifests; manifests()"
    code += "; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("set()"), done.stdout
