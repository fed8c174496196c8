"""``top`` fits its terminal whatever the run is like, and its panes show and sort what the roles say."""

import itertools
from typing import Any

import pytest
from rich.cells import cell_len

from areal_async.monitor.snapshot import MISSING, OK, Member, Status
from areal_async.monitor.top.rows import PaneRows, Row
from areal_async.monitor.top.screen import HELP, KEYS, MIN_HEIGHT, MIN_WIDTH, draw
from areal_async.monitor.top.terminal import keys_in
from areal_async.monitor.top.view import KEPT_S, PANES, SORTS, TopView

LONG = "a very long text that goes on and on " * 8


def _status(**changes: Any) -> Status:
    values: dict[str, Any] = {
        "run": "gsm8k", "state": "running", "reason": "", "step": 3, "steps": 200, "weights_version": "1-3",
        "reward_mean": 0.5, "evaluation": {"accuracy": 0.25},
        "accuracy": 0.25, "admitted": 64, "settled": 16, "in_flight": 48, "credits": 0,
        "queue": {"tickets": {"num_messages": 16, "num_bytes": 4_000_000}},
        "members": [
            Member(role="controller", instance="0", presence=OK, state="admitting", num_starts=1, up_s=60),
            Member(role="node", instance="0", presence=OK, state=LONG, waits_for=LONG, loop_lag_s=0.25, num_starts=3),
            Member(role="trainer", instance="0", presence=MISSING, why="trainer-0 ended by SIGKILL", num_starts=2),
        ],
        "servers": [
            {"id": "0-0", "version": "1-10", "is_fenced": False, "reason": "", "failure": ""},
            {"id": "0-1", "version": "1-9", "is_fenced": True, "reason": "starting", "failure": "ended by SIGKILL"},
        ],
        "notes": [],
    }  # fmt: skip
    return Status(**(values | changes))


EVENTS = (
    {"event": "role.lost", "at": "2026-01-01T00:00:00Z", "crew": "trainer", "reason": LONG, "num_starts": 1},
    {"event": "weights.announced", "at": "2026-01-01T00:00:01Z", "version": "1-3"},
)


def _node(num_scored: int = 0) -> dict[str, Any]:
    return {
        "num_groups_running": 2, "num_scored": num_scored, "tokens_per_s": 1200.0,
        "servers": {
            "0-0": {
                "num_requests": 7, "limit": 64, "outstanding_tokens": 900, "tokens_per_s": 1100.4,
                "first_token_mean_s": 0.052, "num_swaps": 4, "swap_total_s": 0.2,
            },
            "0-1": {"num_requests": 9, "tokens_per_s": 99.6, "first_token_mean_s": None},
        },
        "waits": {"records": [
            ["group 0-1-0", "server 0-0", "a stream on", 3.0, 0.5, 7],
            ["group 0-2-0", "reward", "", 9.0, 8.0, 0],
        ]},
    }  # fmt: skip


@pytest.fixture
def view() -> TopView:
    view = TopView(status=_status())
    view.events.extend(EVENTS)
    view.hear({("node", "0"): _node(), ("controller", "0"): {"max_staleness": 2, "admitted": 64}}, now_s=10)
    view.add_step({"step": 2, "reward_mean": 0.25})
    view.add_step(
        {
            "step": 3, "reward_mean": 0.75, "staleness_tokens/0": 300, "staleness_tokens/2": 100, "staleness_max": 2,
            "num_tokens": 120, "time_step_s": 2.5, "time_wait_data_s": 0.5, "time_train_s": 1.5, "time_weights_s": 0.1,
        }
    )  # fmt: skip
    return view


def _rows(view: TopView, pane: str) -> list[tuple[str, ...]]:
    view.turn_to(PANES.index(pane))
    return [row.cells for row in view.rows()]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (MIN_WIDTH, MIN_HEIGHT), (20, 5), (81, 37)])
@pytest.mark.parametrize("has_help", [False, True])
def test_every_pane_fills_the_terminal_and_nothing_goes_over_its_edge(
    view: TopView, width: int, height: int, has_help: bool
) -> None:
    view.shows_help = has_help
    statuses = [
        None,
        _status(shares={LONG: 0.5, "other": 0.5}),
        _status(notes=[LONG] * 9, members=_status().members * 40, reason=LONG, queue={}),
    ]

    for status, pane in itertools.product(statuses, range(len(PANES))):
        view.status = status
        view.turn_to(pane)
        view.scroll(100)
        lines = draw(view, width, height)

        assert len(lines) == height
        assert max(cell_len(line.plain) for line in lines) <= width


def test_the_head_tells_reward_speed_staleness_and_queue(view: TopView) -> None:
    view.hear({("node", "0"): _node(num_scored=50)}, now_s=12)

    text = "\n".join(line.plain for line in draw(view, 120, 30))

    for piece in ("0.750, last 2: 0.500, evaluation 0.250  ▁█",
                  "1200 tokens/s generated, 80 trained, 25.0 trajectories/s",
                  "2.5 s: 0.5 waiting for data, 1.5 training, 0.1 weights",
                  "0 █████████ 75 %  2 ███ 25 %  of at most 2", "48 in flight (2 running)", "16 tickets (4.0 MB)",
                  "no alarm", KEYS.format(num_panes=5)):  # fmt: skip
        assert piece in text, text


def test_alarms_stand_in_the_head_and_more_than_fit_are_counted(view: TopView) -> None:
    view.status = _status(notes=["one", "two", "three", "four", "five"])

    shown = [line.plain for line in draw(view, 80, 24) if line.plain.startswith("!")]

    assert shown == ["! one", "! two", "! and 3 alarms more"]


def test_servers_tell_their_speed_and_are_sorted_by_trouble_load_speed_and_version(view: TopView) -> None:
    by_sort = {}
    for _ in SORTS["servers"]:
        view.turn_to(PANES.index("servers"))
        by_sort[view.sort_name] = _rows(view, "servers")
        view.sort_next()

    assert by_sort["name"][0] == ("0-0", "1-10", "1100", "7/64", "52", "900", "4", "50", "serves")
    assert by_sort["name"][1] == (
        "0-1", "1-9", "100", "9", "", "0", "0", "", "fenced: starting (last failure: ended by SIGKILL)",
    )  # fmt: skip
    assert [row[0] for row in by_sort["trouble"]] == ["0-1", "0-0"], "the fenced one first"
    assert [row[0] for row in by_sort["load"]] == ["0-1", "0-0"]
    assert [row[0] for row in by_sort["tokens/s"]] == ["0-0", "0-1"]
    assert [row[1] for row in by_sort["version"]] == ["1-9", "1-10"]


def test_waits_and_leases_come_from_what_the_roles_wait_for(view: TopView) -> None:
    waits, leases = _rows(view, "waits"), _rows(view, "leases")

    assert waits[0] == ("8.0", "9.0", "group 0-2-0", "reward")
    assert waits[1] == ("0.5", "3.0", "group 0-1-0", "a stream on server 0-0 and 7 more")
    assert leases[0] == ("9.0", "8.0", "0", "0-2-0", "reward")


def test_only_rows_that_are_looked_at_are_laid_out() -> None:
    laid_out = []

    def lay_out(number: int) -> Row:
        laid_out.append(number)
        return Row((str(number),))

    rows = PaneRows(range(10_000), lay_out)
    assert len(rows) == 10_000
    assert [row.cells for row in rows[500:502]] == [("500",), ("501",)]

    assert laid_out == [500, 501]


def test_waits_are_those_of_the_newest_answers_whatever_was_drawn_before(view: TopView) -> None:
    assert [row[2] for row in _rows(view, "waits")] == ["group 0-2-0", "group 0-1-0"]

    answer = _node() | {"waits": {"records": [["group 0-3-0", "reward", "", 1.0, 1.0, 0]]}}
    view.hear({("node", "0"): answer}, now_s=11)
    assert [row[2] for row in _rows(view, "waits")] == ["group 0-3-0"]
    assert [row[3] for row in _rows(view, "leases")] == ["0-3-0"]
    view.end()
    assert _rows(view, "waits") == []


def test_waits_and_leases_of_one_answer_are_each_as_they_are_sorted_now(view: TopView) -> None:
    records = [["group 0-1-0", "reward", "", 9.0, 1.0, 0], ["group 0-2-0", "reward", "", 2.0, 2.0, 0]]
    view.hear({("node", "0"): _node() | {"waits": {"records": records}}}, now_s=11)

    assert [row[2] for row in _rows(view, "waits")] == ["group 0-2-0", "group 0-1-0"], (
        "the one without news the longest"
    )
    view.sort_next()
    assert [row[2] for row in _rows(view, "waits")] == ["group 0-1-0", "group 0-2-0"], "the oldest"
    assert [row[3] for row in _rows(view, "leases")] == ["0-1-0", "0-2-0"], "the oldest, in columns of their own"


def test_tasks_tell_share_changed_ratio_and_reward_and_have_a_pane_where_there_are_several() -> None:
    view = TopView(
        status=_status(
            shares={"gsm8k": 0.25, "off": 0.0, "code": 0.75}, changes={"tasks.1.ratio": 0.0, "trainer.lr": 1}
        )
    )
    for step in range(1, 31):
        code = {"groups/code": 3, "reward/code": step % 2}
        gsm8k = {"groups/gsm8k": 1, "reward/gsm8k": 0.25 if step <= 20 else 0.75}
        view.add_step({"step": step, **gsm8k, "groups/off": 0, **code})

    assert _rows(view, "tasks") == [
        ("25.0%", "", "10", "0.750", "gsm8k", "▁" * 10 + "█" * 10),
        ("0.0%", "0", "0", "", "off", ""),
        ("75.0%", "", "30", "0.500", "code", "█▁" * 10),
    ]
    view.sort_next()
    assert [row[4] for row in _rows(view, "tasks")] == ["code", "gsm8k", "off"], "the largest share first"
    view.sort_next()
    assert [row[4] for row in _rows(view, "tasks")] == ["code", "gsm8k", "off"], "the least reward first"
    shown = [line.plain for line in draw(view, 80, 24)]
    assert "share  ratio now  groups  reward  task   reward in each step" in shown
    assert shown[-1] == KEYS.format(num_panes=6)

    view.status = _status()  # the controller, which knows the shares, does not answer
    assert [row[:2] for row in _rows(view, "tasks")] == [("", "")] * 3


def test_a_run_of_one_task_has_no_pane_of_tasks(view: TopView) -> None:
    view.turn_to(PANES.index("events") + 1)

    assert view.pane_name == "processes", "past the last comes the first"
    assert not any("tasks" in line.plain for line in draw(view, 80, 24))


def test_a_pane_of_tasks_that_there_are_no_more_gives_way_to_the_last_one() -> None:
    """As when the run is started anew with a single one."""
    view = TopView(status=_status(shares={"gsm8k": 0.5, "code": 0.5}))
    view.turn_to(PANES.index("tasks"))
    assert view.pane_name == "tasks"

    view.status = _status()

    assert view.pane_name == "events"


def test_a_process_that_is_missed_is_shown_with_the_cause_and_sorts_are_kept_by_pane(view: TopView) -> None:
    assert [row[0] for row in _rows(view, "processes")] == ["trainer 0", "controller 0", "node 0"]
    view.sort_next()
    assert [row[0] for row in _rows(view, "processes")] == ["controller 0", "trainer 0", "node 0"]
    view.sort_next()
    assert [row[0] for row in _rows(view, "processes")] == ["node 0", "controller 0", "trainer 0"]
    _rows(view, "events")
    assert view.sort_name == SORTS["events"][0]

    trainer = next(row for row in _rows(view, "processes") if row[0] == "trainer 0")
    assert (trainer[1], trainer[5]) == (MISSING, "trainer-0 ended by SIGKILL")


def test_an_answer_stands_for_a_process_that_is_late_until_it_is_too_old(view: TopView) -> None:
    late = view.hear({("controller", "0"): {}}, now_s=10 + KEPT_S)
    assert ("node", "0") in late

    gone = view.hear({("controller", "0"): {}}, now_s=10.1 + KEPT_S)
    assert ("node", "0") not in gone


def test_a_step_that_is_trained_again_replaces_the_first(view: TopView) -> None:
    view.add_step({"step": 2, "reward_mean": 0.3})

    assert [(line["step"], line["reward_mean"]) for line in view.steps] == [(2, 0.3)]


def test_scrolling_stays_within_the_rows_and_help_covers_the_keys(view: TopView) -> None:
    view.scroll(-5)
    assert view.offset == 0
    view.scroll(50)
    assert view.offset == len(view.rows()) - 1
    view.shows_help = True

    shown = [line.plain for line in draw(view, 100, 40)]

    assert all(line in shown for line in HELP)


def test_a_filter_leaves_the_rows_that_have_its_text_and_is_typed_changed_kept_and_dropped(view: TopView) -> None:
    view.turn_to(PANES.index("processes"))
    view.is_typing = True
    for key in "TRAx":
        view.type(key)
    assert "/TRAx" in draw(view, 80, 24)[-1].plain
    assert list(view.rows()) == []
    view.type("backspace")
    view.type("enter")

    assert [row.cells[0] for row in view.rows()] == ["trainer 0"]
    assert not view.is_typing
    assert "only with 'TRA', Esc for all" in draw(view, 80, 24)[-1].plain
    view.type("escape")
    assert len(view.rows()) == 3


def test_a_narrow_terminal_leaves_out_what_matters_least_and_a_wide_one_shows_all(view: TopView) -> None:
    def heads(width: int) -> str:
        view.turn_to(PANES.index("servers"))
        return next(line.plain for line in draw(view, width, 24) if line.plain.startswith("server "))

    assert heads(80).split() == ["server", "version", "tokens/s", "requests", "first", "ms", "state"]
    assert all(name in heads(200) for name in ("first ms", "tokens due", "swaps", "swap ms"))


def test_how_much_is_out_of_sight_is_said_and_ten_comes_after_two() -> None:
    nodes = [Member(role="node", instance=str(index), presence=OK, state="runs") for index in range(64)]
    view = TopView(status=_status(members=nodes))

    assert [row.cells[0] for row in view.rows()][:11][-2:] == ["node 9", "node 10"]
    view.scroll(10)
    shown = [line.plain for line in draw(view, 80, 24)]

    (tabs,) = [line for line in shown if " 1 processes " in line]
    assert tabs.endswith("11-23 of 64  by trouble"), tabs
    view.scroll(1 << 30)
    shown = [line.plain for line in draw(view, 80, 24)]
    assert any("52-64 of 64" in line for line in shown), shown
    assert any(line.startswith("node 63") for line in shown)


def test_without_its_broker_the_last_that_is_known_is_shown_and_said_to_be_old(view: TopView) -> None:
    view.lose_broker("not within 2 s")

    text = "\n".join(line.plain for line in draw(view, 100, 24))

    assert "run gsm8k: no broker" in text
    assert "! the broker does not answer (not within 2 s); what stands here was said before" in text


def test_of_a_run_that_has_ended_nobody_is_missed_and_its_steps_stay(view: TopView) -> None:
    view.end()

    text = "\n".join(line.plain for line in draw(view, 100, 24))

    assert "run gsm8k: ended  step 3/200" in text
    assert "status --run gsm8k tells how" in text
    assert "no alarm" in text
    assert "no answer" not in text
    assert "0.750, last 2: 0.500" in text


def test_a_run_that_said_how_it_has_ended_is_not_said_to_miss_its_broker(view: TopView) -> None:
    view.status = _status(state="failed", reason="reward: KeyError")
    view.lose_broker("not within 2 s")
    view.end()

    text = "\n".join(line.plain for line in draw(view, 100, 24))

    assert "run gsm8k: failed" in text
    assert "(reward: KeyError)" in text
    assert "broker does not answer" not in text


def test_without_its_controller_the_books_are_not_said_to_be_empty(view: TopView) -> None:
    view.hear({("node", "0"): _node()}, now_s=11 + KEPT_S)

    text = "\n".join(line.plain for line in draw(view, 100, 24))

    assert "the controller keeps the books, and does not answer" in text
    assert "in flight" not in text


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("2", ["2"]),
        ("\x1b[A\x1bOB\x1b[6~", ["up", "down", "page down"]),
        ("\x1b[3~\x1b[1;5Cq", ["q"]),
        ("\x1b", ["escape"]),
        ("/ab\x7f\r", ["/", "a", "b", "backspace", "enter"]),
    ],
)
def test_a_key_that_has_no_meaning_here_is_not_taken_for_others(text: str, keys: list[str]) -> None:
    assert list(keys_in(text)) == keys


def test_why_nothing_is_known_yet_is_in_sight_until_something_is() -> None:
    view = TopView()
    assert "asking ..." in draw(view, 80, 24)[0].plain

    view.lose_broker("not within 2 s")
    assert draw(view, 80, 24)[0].plain == "asking ... (not within 2 s)"

    view.status = _status()
    assert draw(view, 80, 24)[0].plain.startswith("run gsm8k: running")
