"""A comparison is told in sentences, and as Markdown in which what models said is no markup."""

import msgspec
import pytest

from areal_async.versions.comparison import Answer, Comparison, Side, changed_rows
from areal_async.versions.comparison_text import MAX_CHARACTERS, MAX_ROWS, markdown, sentences
from tests.unit.versions.test_comparison import answer, comparison, rewarded


def test_each_task_has_a_sentence_and_a_line_for_each_side() -> None:
    made = comparison(w=100).with_result([*rewarded("a", [0] * 97 + [1, 1, None]), *rewarded("b", [1] * 9 + [0] * 91)])

    first, *sides = sentences(made)

    assert first.startswith("w: 1-40 +0.071 (95 % interval +0.010 to +0.")
    assert "(90 % interval " in next(sentences(msgspec.structs.replace(made, alpha=0.1)))
    assert first.endswith(" against 1-20, 99 rows: 9 won, 88 tied, 2 lost, McNemar p 0.0654, 1 left out, "
                          "which one of them has not answered")  # fmt: skip
    assert sides == [
        "  1-20: accuracy 0.020, 99 rows scored, 1 failed, 4.0 tokens",
        "  1-40: accuracy 0.090, 100 rows scored, 0 failed, 4.0 tokens",
    ]


def test_several_tasks_are_told_together_too() -> None:
    given = [one for task in ("v", "w") for side in ("a", "b") for one in rewarded(side, [0.5, 1], task)]

    told = [line for line in sentences(comparison(v=2, w=2).with_result(given)) if not line.startswith(" ")]

    assert [line.partition(":")[0] for line in told] == ["v", "w", "all tasks"]
    assert (
        told[2] == "all tasks: 1-40 +0.000 (95 % interval +0.000 to +0.000) against 1-20, 4 rows: 0 won, 4 tied, 0 lost"
    )


def test_where_nothing_can_be_paired_it_says_so() -> None:
    made = comparison(w=1).with_result([*rewarded("a", [None]), *rewarded("b", [1])])

    assert next(iter(sentences(made))).startswith("w: 1-40 has no row that both have answered against 1-20, 0 rows: ")


def told(*given: Answer, row: str = "", name: str = "1-20") -> str:
    made = Comparison.of(Side(name=name), Side(name="b"), num_samples=1, rows={"w": 1}, question=None, by="me")
    rows = {("w", one.row): row for one in given}
    return markdown(made.with_result(given), changed_rows(given), rows)


@pytest.mark.parametrize("text", ["```\n# No heading", "````` <b>", "~~~\n|x|"])
def test_what_a_model_said_cannot_leave_its_block(text: str) -> None:
    lines = told(answer("a", 0, 0, text=text), answer("b", 0, 1, text=text), row=text).splitlines()

    inside, fence = [], ""
    for line in lines:
        if not fence and line.startswith("```"):
            fence = line.removesuffix("text")
        elif fence and line == fence:
            fence = ""
        elif fence:
            inside.append(line)
    assert inside == text.splitlines() * 3
    assert not fence


def test_names_are_no_markup() -> None:
    text = told(answer("a", 0, 0), answer("b", 0, 1), name="<script>|x|*y*[z](u)")

    assert "# b against \\<script\\>\\|x\\|\\*y\\*\\[z\\](u)\n" in text


def test_only_so_much_is_shown() -> None:
    given = [answer(side, row, reward, text="x" * 9999) for side, reward in (("a", 0), ("b", 1))
             for row in range(MAX_ROWS + 5)]  # fmt: skip

    text = told(*given)

    assert text.count("\n### w, row ") == MAX_ROWS
    assert "x" * MAX_CHARACTERS + "..." in text
    assert "x" * (MAX_CHARACTERS + 1) not in text
    assert text.endswith("5 more are in answers.jsonl.\n")
