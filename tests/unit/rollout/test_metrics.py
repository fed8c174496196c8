"""What a node says of how fast its servers are: over the last seconds, and of each server alone."""

from areal_async.inference.pool import ServerHandle
from areal_async.rollout.metrics import NUM_INTERVALS, Pace


def test_tokens_are_told_over_the_last_second_and_first_tokens_over_the_last_ten() -> None:
    first, second, pace = ServerHandle("0-0"), ServerHandle("0-1"), Pace()
    pace.note([first, second], now_s=0)
    first.num_generated_tokens, first.num_first_tokens, first.first_token_total_s = 100, 2, 0.5
    pace.note([first, second], now_s=1)
    first.num_generated_tokens = 130
    pace.note([first, second], now_s=3)

    assert pace.of(first) == {"tokens_per_s": 15.0, "first_token_mean_s": 0.25}
    assert pace.of(second) == {"tokens_per_s": 0.0, "first_token_mean_s": None}

    for second_s in range(4, 4 + NUM_INTERVALS):
        pace.note([first, second], now_s=second_s)
    assert pace.of(first) == {"tokens_per_s": 0.0, "first_token_mean_s": None}


def test_a_server_that_has_just_come_has_no_pace_and_one_of_the_same_name_begins_anew() -> None:
    old, pace = ServerHandle("0-0"), Pace()
    old.num_generated_tokens = 500
    pace.note([old], now_s=0)
    new = ServerHandle("0-0")
    assert pace.of(new) == {"tokens_per_s": 0.0, "first_token_mean_s": None}

    pace.note([new], now_s=1)
    new.num_generated_tokens = 7
    pace.note([new], now_s=2)

    assert pace.of(new)["tokens_per_s"] == 7.0
