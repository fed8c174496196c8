"""A game is read from rows of ours and from rows as the public data set has them."""

from workflows.countdown import game


def test_rows_of_both_kinds_are_read() -> None:
    ours = {"question": "There are 16 and 2.", "numbers": [16, 2], "target": 32}
    public = {"nums": [44, 19, 35], "target": 98}

    assert game(ours) == ("There are 16 and 2.", [16, 2], 32)
    question, numbers, target = game(public)
    assert (numbers, target) == ([44, 19, 35], 98)
    assert question.startswith("Reach 98 with the numbers 44, 19, 35, each used at most once")
