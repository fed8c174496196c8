"""A set of ids is what a plain set is, and takes next to nothing where they follow one another."""

import random
from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from areal_async.protocol.fields import is_group_id
from areal_async.protocol.id_sets import GroupIds, NumberSet

NUMBERS = st.lists(st.integers(0, 12) | st.integers(-(2**63), 2**63 - 1), max_size=60)
PART = st.integers(0, 12).map(str) | st.from_regex(r"[0-9]{1,9}", fullmatch=True)
GROUP_ID = st.builds("-".join, st.tuples(PART, PART | st.from_regex(r"[0-9]{10,15}", fullmatch=True), PART))
ANY = st.lists(
    GROUP_ID | st.sampled_from(["", "a", "0-1", "0-1-0 ", "0-1-0\n", "-0-1-0", "٣-1-0", "3-1-0"]), max_size=60
)


@given(NUMBERS, NUMBERS)
def test_numbers_are_a_set(added: list[int], asked: list[int]) -> None:
    numbers, plain = NumberSet(), set[int]()
    for number in added:
        numbers.add(number)
        plain.add(number)
        assert len(numbers) == len(plain)

    assert list(numbers) == sorted(plain)
    assert [one in numbers for one in added + asked] == [one in plain for one in added + asked]


@given(NUMBERS)
def test_numbers_take_as_many_intervals_as_there_are_gaps(added: list[int]) -> None:
    numbers = NumberSet(added)

    assert len(numbers._first) == sum(one - 1 not in numbers for one in numbers)


@given(ANY, ANY)
def test_group_ids_are_a_set(added: list[str], asked: list[str]) -> None:
    ids = GroupIds(added)

    assert ids == set(added)
    assert [one in ids for one in added + asked] == [one in set(added) for one in added + asked]


@given(ANY, ANY)
def test_a_copy_goes_its_own_way(added: list[str], later: list[str]) -> None:
    ids = GroupIds(added)
    copy = deepcopy(ids)
    ids.update(later)

    assert copy == set(added)


@given(GROUP_ID)
def test_every_group_id_of_the_wire_is_tried(group_id: str) -> None:
    assert is_group_id(group_id)


def test_whole_epochs_take_an_interval_each_in_whatever_order_their_prompts_end() -> None:
    ids, chance = GroupIds(), random.Random(1)
    for epoch in range(20):
        rows = list(range(500))
        chance.shuffle(rows)
        ids.update(f"{epoch}-{row}-0" for row in rows)

    assert len(ids) == 10_000
    assert [len(prompts._first) for prompts in ids._by_attempt.values()] == [20]
