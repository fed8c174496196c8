"""What ``try`` draws: every token once, coloured as sampled exactly where the loss mask is True."""

import io
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.segment import Segment

from areal_async.monitor.transcript import SAMPLED_BAR, SHADES, Transcript, legend, shade, spans_of
from areal_async.monitor.trial_output import attempt_json, summary
from areal_async.protocol.types import Prompt, Slot, SlotStatus, Trajectory, Turn, VersionSpan
from areal_async.rollout.policy.merge import merge_turns
from areal_async.rollout.stopwatch import TimedTurn, Times
from areal_async.rollout.trial import Attempt
from areal_async.rollout.user_code.source_location import SourceLocation
from tests.unit.rollout.byte_model import END, codec


class Bytes:
    """A token per byte, and one for the end of a turn."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(b"<end>" if token == END else bytes([token]) for token in token_ids).decode(errors="replace")


SURE, UNLIKELY = math.log(0.95), math.log(0.02)


def turn(prompt: str | list[int], said: str, logprobs: list[float] | None = None, version: str = "1-4") -> Turn:
    ids = list(said.encode())
    return Turn(
        prompt_ids=prompt if isinstance(prompt, list) else list(prompt.encode()),
        output_ids=ids,
        logprobs=logprobs or [SURE] * len(ids),
        spans=[VersionSpan(version=version, start=0, end=len(ids))],
        oldest=version,
        finish_reason="stop",
    )


def attempt(*turns: Turn, sibling: int = 0, status: SlotStatus = SlotStatus.SCORED, **other: Any) -> Attempt:
    slot = Slot(
        sibling=sibling,
        sample_uid="u",
        status=status,
        reward=0.5 if status is SlotStatus.SCORED else 0.0,
        reason="" if status is SlotStatus.SCORED else "workflow w: KeyError: 'x'",
        oldest="1-4",
        newest="1-4",
    )
    return Attempt(
        prompt=Prompt(epoch=0, index=7, row={"question": "q"}),
        trajectory=Trajectory(slot=slot, sequences=[], info={"rollout/num_breaks": 0.0, "num_words": 3.0}),
        turns=[TimedTurn(turn=one, duration_s=0.5, first_token_s=0.25) for one in turns],
        sequences=merge_turns(list(turns)),
        times=Times(total_s=2.0, model_s=1.0, tools_s=0.25, rewards_s=0.5),
        **other,
    )


FIRST = turn("ask:", "ab", [SURE, UNLIKELY])
SECOND = turn("ask:ab|tool 5|", "cd")
"""The conversation goes on after a tool has answered."""


def segments(renderable: Any, width: int = 80) -> list[Segment]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="256", highlight=False)
    return list(console.render(renderable))


def plain(renderable: Any, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_token_is_coloured_as_sampled_exactly_where_the_mask_is_true() -> None:
    one = attempt(FIRST, SECOND)
    (sequence,) = one.sequences
    (spans,) = [spans_of(sequence, one.turns, taken=set())]

    drawn = [(segment.text, str(segment.style)) for segment in segments(Transcript(Bytes()).draw(one))]
    tokens = [(text, style) for text, style in drawn if style in {"dim", *(style for _, style in SHADES)}]

    assert [span.is_sampled for span in spans for _ in range(span.start, span.end)] == sequence.loss_mask.tolist()
    assert [text for text, _ in tokens] == list("ask:ab|tool 5|cd")
    assert [style != "dim" for _, style in tokens] == sequence.loss_mask.tolist()
    assert [style for _, style in tokens if style != "dim"] == list(map(shade, (SURE, UNLIKELY, SURE, SURE)))
    assert shade(SURE) != shade(UNLIKELY)
    assert "dim" not in {style for _, style in SHADES}


def test_shades_follow_the_probability() -> None:
    assert [shade(math.log(p)) for p in (1.0, 0.9, 0.89, 0.5, 0.1, 0.01, 0.001)] == [
        SHADES[0][1], SHADES[0][1], SHADES[1][1], SHADES[1][1], SHADES[2][1], SHADES[3][1], SHADES[4][1]
    ]  # fmt: skip
    assert shade(-math.inf) == SHADES[-1][1]
    assert shade(0.001) == SHADES[0][1]


def test_without_a_terminal_there_are_bars_and_no_codes() -> None:
    text = plain(Transcript(Bytes()).draw(attempt(FIRST, SECOND)))

    assert "\x1b" not in text
    assert [line for line in text.splitlines() if line.startswith(SAMPLED_BAR)] == [
        "┃ turn 1: 2 tokens in 0.50 s (first after 0.25), stopped by itself",
        "┃ ab",
        "┃ turn 2: 2 tokens in 0.50 s (first after 0.25), stopped by itself",
        "┃ cd",
    ]
    assert "  ask:\n" in text
    assert "  |tool 5|\n" in text
    assert "2 turns, 16 tokens, 4 sampled, 2.00 s (model 1.00, tools 0.25, rewards 0.50), 4" in text
    assert "\ninfo: num_words 3\n" in text
    assert 'row 7 {"question":"q"}' in text


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_wider_than_the_terminal_or_lost_in_wrapping(width: int) -> None:
    long = "".join(chr(33 + number % 90) for number in range(500))
    one = attempt(turn(f"{long}\n{'wide 漢字 ' * 40}", long[::-1]))

    text = plain(Transcript(Bytes(), with_tokens=True).draw(one), width)

    assert all(Console(width=width).render_str(line).cell_len <= width for line in text.splitlines())
    said = "".join(line.removeprefix(SAMPLED_BAR) for line in text.splitlines() if line.startswith(SAMPLED_BAR))
    assert said.endswith(long[::-1])


def test_what_a_model_writes_does_not_reach_the_terminal_as_an_order() -> None:
    hostile = "\x1b[2J\x1b]0;title\x07\r[red]x"

    drawn = "".join(segment.text for segment in segments(Transcript(Bytes()).draw(attempt(turn("q", hostile)))))

    assert "\x1b" not in drawn
    assert "\x07" not in drawn
    assert "␛[2J␛]0;title␇␍[red]x" in drawn


def test_siblings_do_not_repeat_how_they_begin() -> None:
    transcript = Transcript(Bytes())
    first, second = (plain(transcript.draw(attempt(FIRST, sibling=sibling))) for sibling in range(2))

    assert "  ask:\n" in first
    assert "[the same 4 tokens as in sibling 0]" in second
    assert "ask:" not in second


def test_two_replies_to_one_question_are_two_sequences_of_their_own_turns() -> None:
    one = attempt(turn("ask:", "ab"), turn("ask:", "ab"))
    taken: set[int] = set()

    numbers = [[span.turn for span in spans_of(sequence, one.turns, taken=taken)] for sequence in one.sequences]

    assert numbers == [[None, 0], [None, 1]]
    assert "sequence 2 of 2" in plain(Transcript(Bytes()).draw(one))


def test_a_failure_is_told_with_its_reason_and_places() -> None:
    place = SourceLocation("workflows/w.py", 9, "w", 'prompt["x"]')
    text = plain(Transcript(Bytes()).draw(attempt(FIRST, status=SlotStatus.FAILED, locations=[place])))

    assert "row 7 sibling 0: failed" in text
    assert text.endswith("failed: workflow w: KeyError: 'x'\n  workflows/w.py:9 in w\n      prompt[\"x\"]\n\n")


def test_table_has_a_row_per_token_with_what_is_trained_of_it() -> None:
    text = plain(Transcript(Bytes(), with_tokens=True).draw(attempt(FIRST)))

    lines = [line.split() for line in text.splitlines()]
    rows = [words for words in lines if words[:1] and words[0].isdecimal() and words[1].isdecimal()]
    assert rows == [
        ["0", "97", "a", "0"], ["1", "115", "s", "0"], ["2", "107", "k", "0"], ["3", "58", ":", "0"],
        ["4", "97", "a", "1", f"{SURE:.4f}", "1-4"], ["5", "98", "b", "1", f"{UNLIKELY:.4f}", "1-4"],
    ]  # fmt: skip


def test_legend_shows_every_shade() -> None:
    styles = {str(segment.style) for segment in segments(legend())}

    assert {style for _, style in SHADES} <= styles


def test_json_holds_what_was_recorded() -> None:
    one = attempt(FIRST, SECOND, locations=[SourceLocation("w.py", 1, "w", "x")])

    read = json.loads(attempt_json(one, codec()))

    (sequence,) = one.sequences
    assert read["turns"][1]["output_ids"] == SECOND.output_ids
    assert read["turns"][0]["text"] == "ab"
    assert read["sequences"][0]["token_ids"] == sequence.token_ids.tolist()
    assert read["sequences"][0]["loss_mask"] == sequence.loss_mask.tolist()
    assert read["sequences"][0]["versions"] == [None] * 4 + ["1-4"] * 2 + [None] * 8 + ["1-4"] * 2
    np.testing.assert_allclose(read["sequences"][0]["logprobs"], sequence.logprobs)
    assert (read["index"], read["sibling"], read["status"], read["reward"]) == (7, 0, "scored", 0.5)
    assert read["times"] == {"total_s": 2.0, "model_s": 1.0, "tools_s": 0.25, "rewards_s": 0.5}
    assert read["places"] == [{"file": "w.py", "line": 1, "function": "w", "source": "x"}]


def test_summary_counts_all_and_averages_the_scored() -> None:
    scored, failed = SlotStatus.SCORED, SlotStatus.FAILED

    assert summary([(scored, 1.0), (scored, 0.0), (failed, 0.0)]) == (
        "3 attempts: reward 0.500, std 0.500; 2 scored, 1 failed, 0 rejected"
    )
    assert summary([(scored, 1e300), (scored, -2e6)]).startswith("2 attempts: reward 5.000e+299, std 5.000e+299; ")
    assert summary([(failed, 0.0)]) == "1 attempt: 0 scored, 1 failed, 0 rejected"
    assert summary([(scored, 1.0)] * 2).endswith("; with rewards all alike a group trains nothing")


def test_end_of_turn_is_shown_as_a_token_that_was_sampled() -> None:
    said = Turn(prompt_ids=[97], output_ids=[98, END], logprobs=[SURE, SURE], spans=[
        VersionSpan(version="1-4", start=0, end=2)], oldest="1-4", finish_reason="stop")  # fmt: skip

    assert "┃ b<end>\n" in plain(Transcript(Bytes()).draw(attempt(said)))
