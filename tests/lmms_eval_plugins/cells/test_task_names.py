"""The names of tasks, found in the text of their files: those that lmms-eval's own index has."""

import pytest

from lmms_eval_plugins.cells.names import defined_in, task_folders, task_kinds


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("task: a\n", {"a": "task"}),
        ('include: x\n"task" : "a"  # the first\n', {"a": "task"}),
        ("group: g\ntask:\n  # left out:\n  # - x\n- a\n- b\n", {"g": "group"}),
        ("group: 'g'\ntask: [a, b]\n", {"g": "group"}),
        ("tag: t\ntask: a\ngroup:\n  - u\n  - v\n", {"a": "task", "t": "tag", "u": "tag", "v": "tag"}),
        ("group: g\n", {}),
        ("dataset_path: x\n  task: a\n", {}),
    ],
)
def test_what_a_file_defines(text, kinds, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    assert defined_in(tmp_path / "a.yaml") == kinds


def test_what_a_file_includes_is_its_own_unless_it_says_otherwise(tmp_path):
    (tmp_path / "template").write_text("tag: t\ntask: b\n")
    (tmp_path / "a.yaml").write_text("include: template\ntask: a\n")
    assert defined_in(tmp_path / "a.yaml") == {"a": "task", "t": "tag"}


def test_tasks_groups_and_tags_of_the_installed_lmms_eval_are_found():
    kinds = task_kinds(task_folders()["lmms-eval"])
    # With a blank before the colon, a byte-order mark, comments in a list, a tag, one in a template; an ordinary one.
    for name, kind in (
        ("flickr30k_test", "task"),
        ("step2_audio_paralinguistic_pitch", "task"),
        ("wm_abench", "group"),
        ("wm_abench_subtasks", "tag"),
        ("verl_reasoning", "tag"),
        ("mmmu_val", "task"),
    ):
        assert kinds.get(name) == kind


@pytest.mark.slow
def test_every_name_of_lmms_evals_own_index_is_found_and_no_other():
    from lmms_eval.tasks import TaskManager

    assert task_kinds(task_folders()["lmms-eval"]).keys() == set(TaskManager().all_tasks)
