"""Ids and versions read back as they were written, and a row says what it does not have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.protocol.types import GroupId, OutcomeKind, Prompt, Version

COUNTS = st.integers(min_value=0, max_value=10**9 - 1)


@given(COUNTS, COUNTS)
def test_a_version_survives_its_text_and_its_packed_form(lineage: int, step: int) -> None:
    version = Version(lineage, step)

    assert Version.parse(str(version)) == version
    assert Version.unpack(version.pack()) == version


@given(COUNTS, COUNTS, COUNTS)
def test_a_group_id_survives_its_text(epoch: int, index: int, attempt: int) -> None:
    group = GroupId(epoch, index, attempt)

    assert GroupId.parse(str(group)) == group


@pytest.mark.parametrize("text", ["", "1", "1-", "-1", "a-1", "1-2-3", "1--2"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="weights version"):
        Version.parse(text)


def test_versions_order_by_lineage_then_step() -> None:
    assert Version(1, 9) < Version(2, 0) < Version(2, 1)


def test_late_duplicate_and_readmitted_settle_nothing() -> None:
    settles_nothing = {OutcomeKind.LATE, OutcomeKind.DUPLICATE, OutcomeKind.READMITTED}
    assert {kind for kind in OutcomeKind if not kind.settles} == settles_nothing


def test_only_what_failed_or_was_given_up_is_tried_again() -> None:
    again = {OutcomeKind.FAILED, OutcomeKind.ABANDONED, OutcomeKind.ROLLED_BACK}
    assert {kind for kind in OutcomeKind if kind.readmits} == again


def test_a_column_that_a_row_does_not_have_is_told_with_those_it_has() -> None:
    prompt = Prompt(epoch=0, index=7, row={"question": "q", "reply": "a"})

    with pytest.raises(KeyError) as caught:
        prompt["answer"]

    assert str(caught.value) == "row 7 has no column 'answer', its columns are question, reply"
    assert prompt["reply"] == "a"
