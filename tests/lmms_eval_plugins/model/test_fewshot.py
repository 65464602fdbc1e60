"""Examples before a question: the same for a question whatever comes before it, and with images as turns of a chat."""

import pytest
from datasets import Dataset, DatasetDict

from lmms_eval_plugins.model.fewshot import FewShot
from tests.support.checkpoints import image, load_lm, requests

ROWS = [{"question": f"what is {n}?", "answer": str(n), "picture": image(n, 16, 16)} for n in range(8)]


@pytest.fixture
def task(monkeypatch):
    """(config) -> a task of lmms-eval over ROWS, with two examples."""
    import lmms_eval.api.metrics  # noqa: F401 (fills the registry of metrics)
    from lmms_eval.api.task import ConfigurableMessagesTask

    def download(self, dataset_kwargs=None):
        self.dataset = self.dataset_no_image = DatasetDict({"test": Dataset.from_list(ROWS)})

    monkeypatch.setattr(ConfigurableMessagesTask, "download", download)

    def build(sampler="default", **config):
        own = {
            "task": "sums", "test_split": "test", "output_type": "generate_until", "num_fewshot": 2,
            "doc_to_text": "{{question}}", "doc_to_target": "answer", "generation_kwargs": {"until": ["\n"]},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
            "fewshot_config": {"sampler": sampler}, "fewshot_split": "test",
        }  # fmt: skip
        return ConfigurableMessagesTask(config={**own, **config})

    return build


def turns(messages):
    return [(m["role"], "".join(part.get("text", "IMAGE ") for part in m["content"])) for m in messages]


def test_examples_are_turns_and_the_description_comes_first(task):
    made = task("first_n", description="Add up: {{1}}. ")
    messages = FewShot(as_turns=True).messages(made.doc_to_messages, made.test_docs()[5], 5)
    assert turns(messages) == [
        ("user", "Add up: 1. what is 0?"), ("assistant", "0"), ("user", "what is 1?"), ("assistant", "1"),
        ("user", "what is 5?"),
    ]  # fmt: skip


def test_the_question_itself_is_no_example(task):
    made = task("first_n")
    messages = FewShot(as_turns=True).messages(made.doc_to_messages, made.test_docs()[0], 0)
    assert [text for _, text in turns(messages)][::2] == ["what is 1?", "what is 2?", "what is 0?"]


def test_examples_bring_their_images(task):
    made = task("first_n", doc_to_visual=lambda doc: [doc["picture"]])
    messages = FewShot(as_turns=True).messages(made.doc_to_messages, made.test_docs()[5], 5)
    assert [text for role, text in turns(messages) if role == "user"] == [
        "IMAGE what is 0?", "IMAGE what is 1?", "IMAGE what is 5?",
    ]  # fmt: skip
    assert messages[0]["content"][0]["url"].getpixel((3, 3)) == ROWS[0]["picture"].getpixel((3, 3))


def test_the_text_of_a_choice_is_the_answer(task):
    made = task("first_n", doc_to_target=1, doc_to_choice=["no", "yes"])
    messages = FewShot(as_turns=True).messages(made.doc_to_messages, made.test_docs()[5], 5)
    assert turns(messages)[1] == ("assistant", "yes")


@pytest.mark.parametrize("as_turns", [True, False])
def test_a_questions_examples_do_not_depend_on_the_questions_before_it_but_on_the_seed(task, as_turns):
    made = task()
    docs = made.test_docs()

    def shown(order, seed=1):
        few_shot = FewShot(seed, as_turns)
        return {n: turns(few_shot.messages(made.doc_to_messages, docs[n], n)) for n in order}

    assert shown([0, 1, 2, 3]) == shown([3, 1, 0, 2])
    assert shown([0, 1, 2, 3]) != shown([0, 1, 2, 3], seed=2)


def test_without_examples_messages_are_the_tasks_own(task):
    made = task(num_fewshot=0)
    doc = made.test_docs()[5]
    assert FewShot(as_turns=True).messages(made.doc_to_messages, doc, 5) == made.doc_to_messages(doc)


def test_the_model_is_shown_the_turns(task, checkpoint):
    made, lm = task("first_n"), load_lm(checkpoint("llama"))
    docs = [{"text": row["question"], **row} for row in made.test_docs()]
    request = requests(lm, docs)[5]
    request.arguments = (request.args[0], made.doc_to_messages, *request.args[2:])
    lm.few_shot = FewShot(as_turns=True)
    text = lm.tokenizer.decode(lm.prepare([request]).inputs["input_ids"][0])
    assert text == "[user] what is 0?[assistant] 0[user] what is 1?[assistant] 1[user] what is 5?[assistant] "
