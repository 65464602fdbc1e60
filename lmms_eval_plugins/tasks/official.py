"""A bundled task that inherits everything but its data from an official lmms-eval task."""

from pathlib import Path

import lmms_eval.tasks
from lmms_eval.api.task import ConfigurableMessagesTask
from lmms_eval.utils import load_yaml_config

OFFICIAL_TASKS = Path(lmms_eval.tasks.__file__).parent


class OfficialTask(ConfigurableMessagesTask):
    """A chat task whose YAML names the official one under `official`, relative to lmms-eval's task folder.

    lmms-eval's own `include` takes an absolute path or one relative to the file; neither can portably name a file of an
    installed package. Prompt, metric and aggregation are the installed package's own code.
    """

    def __init__(self, config: dict, **kwargs) -> None:
        own = {key: value for key, value in config.items() if key not in ("class", "official")}
        official = load_yaml_config(str(OFFICIAL_TASKS / config["official"]), mode="full")
        super().__init__(config={**official, **own}, **kwargs)


def first_answer(doc: dict) -> str:
    """Return a question's target for tables; the metric reads all ten answers. TextVQA's own target is a template that
    yields `answer` for every question, and that lmms-eval compiles anew each time."""
    return doc["answers"][0]
