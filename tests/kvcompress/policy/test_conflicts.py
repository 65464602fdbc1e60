"""What does not go together: the docs list it, and each is refused, with the value that does not fit."""

import pytest

from kvcompress.errors import KVCompressError
from kvcompress.policy import conflicts
from kvcompress.policy.conflicts import Conflict, check_conflicts
from kvcompress.policy.make import make_policy
from tests import conflicts_list


def test_the_docs_list_them_all():
    page = conflicts_list.PAGE.read_text(encoding="utf-8")
    listed = page.partition(conflicts_list.BEGIN)[2].partition(conflicts_list.END)[0]
    assert listed == conflicts_list.rendered(), "python -m tests.conflicts_list"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("method", "method 'snapkv' with scorer='knorm' does not go with pages: so it is"),
        ("scope", "scope='context' does not go with pages: so it is"),
        ("merge", "merge='none' does not go with pages: so it is"),
        ("a calibration", "a calibration does not go with pages: so it is"),
    ],
)
def test_the_error_names_the_value_that_does_not_fit(monkeypatch, other, said):
    monkeypatch.setattr(conflicts, "CONFLICTS", (Conflict("pages", other, "so it is", lambda policy: True),))
    policy = make_policy("snapkv", 0.5, scorer="knorm", scope="context")
    with pytest.raises(KVCompressError) as refused:
        check_conflicts(policy, "pages")
    assert str(refused.value) == said
    check_conflicts(policy, "speech")


def test_without_a_condition_an_option_is_refused_where_it_is_not_the_default():
    conflict = Conflict("pages", "scope", "so it is")
    assert not conflict.is_in(make_policy("snapkv", 0.5))
    assert conflict.is_in(make_policy("snapkv", 0.5, scope="context"))
