"""Register this package's model with lmms-eval, through the entry-point group `lmms_eval.models`.

Loaded at every start of lmms-eval, so it imports neither torch nor transformers.
"""

from lmms_eval.models.registry_v2 import ModelManifest

MODEL_ID = "kvcompress"


def manifests() -> list[ModelManifest]:
    """Return the models of this package: one generic chat model, `--model kvcompress`."""
    return [ModelManifest(model_id=MODEL_ID, chat_class_path="lmms_eval_plugins.model.lm.KVCompressLM")]
