"""A comparison keeps each answer as it comes, asks none of them again, and refuses a folder that has another's."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pytest

from areal_async.errors import UserError
from areal_async.versions.comparison import (
    ANSWERS,
    MAX_LINE_BYTES,
    MAX_RESULT_BYTES,
    MAX_TEXT_CHARACTERS,
    RESULT,
    Answer,
    Comparison,
    Side,
    Which,
    changed_rows,
    opened,
    read_answers,
    read_result,
)

A, B = Side(name="1-20", run="r", version="1-20"), Side(name="1-40", run="r", version="1-40")


def comparison(*, num_samples: int = 1, question: object = "sampling", **rows: int) -> Comparison:
    return Comparison.of(A, B, num_samples=num_samples, rows=rows or {"w": 3}, question=question)


def answer(
    side: Which, row: int, reward: float | None = 1.0, *, sample: int = 0, task: str = "w", text: str = ""
) -> Answer:
    failed = {"error": "too late", "num_tokens": 99} if reward is None else {"num_tokens": 4}
    return Answer(side=side, task=task, row=row, sample=sample, reward=reward, text=text, **failed)


def rewarded(side: Which, rewards: Sequence[float | None], task: str = "w") -> Iterable[Answer]:
    return (answer(side, row, reward, task=task) for row, reward in enumerate(rewards))


def test_what_was_answered_before_a_kill_is_not_asked_again(tmp_path: Path) -> None:
    with opened(tmp_path / "c", comparison()) as folder:
        assert len(folder.left) == 6
        folder.add(answer("a", 2))
        folder.add(answer("b", 0, None))
    with (tmp_path / "c" / ANSWERS).open("ab") as file:
        file.write(msgspec.json.encode(answer("a", 0))[:20])  # cut short: it was never given

    with opened(tmp_path / "c", comparison()) as folder:
        assert folder.left == [("a", "w", 0, 0), ("a", "w", 1, 0), ("b", "w", 1, 0), ("b", "w", 2, 0)]
        folder.add(answer("a", 0))

    assert [one.asked for one in read_answers(tmp_path / "c")] == [("a", "w", 2, 0), ("b", "w", 0, 0), ("a", "w", 0, 0)]


def test_an_answer_is_in_the_file_before_anything_else_happens(tmp_path: Path) -> None:
    with opened(tmp_path, comparison()) as folder:
        folder.add(answer("a", 0))
        assert read_answers(tmp_path) == [answer("a", 0)]

        folder.add(answer("a", 1, text="x" * 2 * MAX_TEXT_CHARACTERS))
        assert len(read_answers(tmp_path)[1].text) == MAX_TEXT_CHARACTERS


def test_the_result_stands_in_the_folder_and_is_read_back(tmp_path: Path) -> None:
    with opened(tmp_path, comparison()) as folder:
        assert read_result(tmp_path).overall is None
        for one in [*rewarded("a", [0, 1, 0]), *rewarded("b", [1, 1, 0])]:
            folder.add(one)
        made = folder.finish()

    assert read_result(tmp_path) == made
    assert made.overall is not None
    assert (made.overall.wins, made.overall.ties, made.overall.losses) == (1, 2, 0)
    assert made.overall.difference == pytest.approx(1 / 3)
    written = (tmp_path / RESULT).stat().st_mtime_ns
    with opened(tmp_path, comparison()) as folder:
        assert folder.left == []
        assert folder.finish() == made
    assert (tmp_path / RESULT).stat().st_mtime_ns == written, "it is no newer for being looked at"


def test_an_error_is_counted_and_is_no_reward_of_0() -> None:
    made = comparison(w=4).with_result([*rewarded("a", [0, None, 1, 1]), *rewarded("b", [1, 1, None, 1])])

    (one,) = made.tasks
    assert (one.num_rows, one.num_left_out, one.wins, one.difference) == (2, 2, 1, 0.5)
    assert (one.a.num_scored, one.a.num_failed, one.a.reasons) == (3, 1, {"too late": 1})
    assert one.a.accuracy == pytest.approx(2 / 3), "over all rows that it has answered"
    assert one.a.num_tokens_mean == 4


def test_rows_of_several_tasks_are_compared_by_task_and_all_together() -> None:
    """A row of one task is another than that of the same number of the other."""
    given = [
        *rewarded("a", [0, 0], "v"),
        *rewarded("b", [1, 1], "v"),
        *rewarded("a", [1], "w"),
        *rewarded("b", [0], "w"),
    ]

    made = comparison(v=2, w=1).with_result(given)

    assert [(one.task, one.num_rows, one.difference) for one in made.tasks] == [("v", 2, 1.0), ("w", 1, -1.0)]
    assert made.overall is not None
    assert (made.overall.task, made.overall.num_rows, made.overall.wins, made.overall.losses) == ("", 3, 2, 1)
    assert (made.overall.b.num_scored, made.overall.b.accuracy) == (3, pytest.approx(2 / 3))


def test_several_answers_to_a_row_are_one_pair_and_have_pass_at_k() -> None:
    given = [answer(side, 0, reward, sample=sample) for side, rewards in (("a", [0, 0]), ("b", [0, 1]))
             for sample, reward in enumerate(rewards)]  # fmt: skip

    (one,) = comparison(num_samples=2, w=1).with_result(given).tasks

    assert (one.num_rows, one.difference, one.low) == (1, 0.5, None)
    assert (one.b.accuracy, one.b.pass_at, one.b.num_samples) == (0.5, {"1": 0.5, "2": 1.0}, 2)


def test_rows_that_differ_are_given_what_was_lost_most_first() -> None:
    given = [*rewarded("a", [0, 1, 0.5, 1, None]), *rewarded("b", [1, 1, 0, 0, 1])]

    changed = changed_rows(given)

    assert [(one.row, one.difference) for one in changed] == [(3, -1.0), (2, -0.5), (0, 1.0)]
    assert (changed[0].a[0].reward, changed[0].b[0].reward) == (1, 0)


@pytest.mark.parametrize(
    "other",
    [
        comparison(question="other"),
        comparison(num_samples=2),
        comparison(w=4),
        Comparison.of(B, A, num_samples=1, rows={"w": 3}, question="sampling"),
    ],
)
def test_a_folder_of_another_question_is_refused(other: Comparison, tmp_path: Path) -> None:
    with opened(tmp_path, comparison()):
        pass

    with pytest.raises(UserError, match="which has a comparison of 1-20 and 1-40 with other sides, rows or settings"):
        opened(tmp_path, other).__enter__()
    assert other.comparison_id != comparison().comparison_id


def test_one_process_at_a_time_adds_to_a_comparison(tmp_path: Path) -> None:
    with opened(tmp_path, comparison()):
        with pytest.raises(UserError, match="--output: another process compares in "):
            opened(tmp_path, comparison()).__enter__()
    with opened(tmp_path, comparison()):
        pass


def test_the_name_of_its_folder_has_both_sides_and_no_way_out_of_it() -> None:
    sides = Side(name="../../etc/x y"), Side(name="http://h:1/" + "z" * 200)

    name = Comparison.of(*sides, num_samples=1, rows={}, question=None).comparison_id

    assert name.startswith("etc-x-y_")
    assert "/" not in name
    assert len(name) < 100


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"{}\n", "line 1 cannot be read: answer: "),
        (b'{"side": "c", "task": "w", "row": 0}\n', "line 1 cannot be read: answer: "),
        (b'{"side": "a", "task": "../w", "row": 0}\n', "line 1 cannot be read: answer: "),
        (b'{"side": "a", "task": "w", "row": -1}\n', "line 1 cannot be read: answer: "),
        (b'{"side": "a", "task": "w", "row": 0, "reward": NaN}\n', "line 1 cannot be read: answer: "),
        (b"x" * (MAX_LINE_BYTES + 1) + b"\n", "got a line of more than "),
    ],
)
def test_a_damaged_line_is_told_in_one_sentence(line: bytes, sentence: str, tmp_path: Path) -> None:
    with opened(tmp_path, comparison()):
        pass
    (tmp_path / ANSWERS).write_bytes(line)

    with pytest.raises(UserError, match=sentence):
        opened(tmp_path, comparison()).__enter__()
    assert (tmp_path / ANSWERS).read_bytes() == line, "nothing is lost of it"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 2}'])
def test_a_damaged_result_is_told_in_one_sentence(text: str, tmp_path: Path) -> None:
    with opened(tmp_path, comparison()):
        pass
    (tmp_path / RESULT).write_text(text)

    with pytest.raises(UserError, match="comparison.json: cannot be read: .*; remove its folder, and compare again"):
        read_result(tmp_path)


@pytest.mark.parametrize(("changes", "padding"), [({"schema": 2}, 0), ({}, MAX_RESULT_BYTES)])
def test_a_result_of_a_later_schema_or_without_end_is_refused(
    changes: dict[str, object], padding: int, tmp_path: Path
) -> None:
    with opened(tmp_path, comparison()):
        pass
    whole = json.loads((tmp_path / RESULT).read_text())
    (tmp_path / RESULT).write_text(json.dumps({**whole, **changes}) + " " * padding)

    with pytest.raises(UserError, match="comparison.json: cannot be read: "):
        read_result(tmp_path)


def test_what_is_no_comparison_is_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file or directory; name the folder of a comparison"):
        read_result(tmp_path)
    with pytest.raises(UserError, match="cannot be read: No such file or directory; name the folder of a comparison"):
        read_answers(tmp_path)
