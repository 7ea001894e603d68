"""Error numbers are wire format: frozen, unique, and every number gives an exception."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden import samples
from zmqueue import errors

ALL = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.ZmqueueError) and cls is not errors.ZmqueueError
]


def test_numbers_and_flags_are_frozen():
    """New errors are added with `python -m tests.golden.samples --write`; old ones never change."""
    assert samples.error_numbers() == samples.stored("errors.json")


def test_no_two_errors_share_a_number():
    assert len({cls.code for cls in ALL}) == len(ALL)
    assert set(errors.BY_CODE.values()) == set(ALL)


def test_no_error_has_the_number_of_success():
    assert 0 not in errors.BY_CODE


def test_our_own_numbers_stay_clear_of_kafkas():
    assert all(cls.code < 200 or 1001 <= cls.code <= 9_999 for cls in ALL)


def test_every_error_sets_its_own_number_and_says_what_it_means():
    for cls in ALL:
        assert "code" in vars(cls), cls
        assert cls.__doc__, cls


@pytest.mark.parametrize("cls", ALL)
def test_an_error_survives_the_wire(cls):
    found = errors.from_code(cls.code, "why")
    assert type(found) is cls
    assert str(found) == "why"
    assert found.name == errors.error_name(cls)


@given(st.integers(), st.text(max_size=20))
def test_every_number_gives_an_exception(code, message):
    assert isinstance(errors.from_code(code, message), errors.ZmqueueError)


def test_an_unknown_number_is_kept_in_the_text():
    found = errors.from_code(4711)
    assert type(found) is errors.UnknownServerError
    assert "4711" in str(found)


def test_an_error_without_a_text_explains_itself():
    assert str(errors.NotLeader()) == "Another broker leads this partition: refresh metadata, then retry."


def test_names_read_like_kafkas():
    assert errors.error_name(errors.NotLeader) == "NOT_LEADER"
    assert errors.error_name(errors.NotEnoughReplicasAfterAppend) == "NOT_ENOUGH_REPLICAS_AFTER_APPEND"


def test_whoever_is_told_that_metadata_is_stale_may_retry():
    assert all(cls.retriable for cls in ALL if cls.refresh_metadata)
