"""``top`` fits its terminal whatever the run is like, and its panes show and sort what the roles say."""

import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rich.cells import cell_len
from textual import events
from textual.pilot import Pilot

from areal_async.monitor.snapshot import MISSING, OK, Member, Status
from areal_async.monitor.top.app import HELP, KEYS, MIN_HEIGHT, MIN_PAUSE_S, MIN_WIDTH, TYPING, TopApp
from areal_async.monitor.top.rows import PANES, PaneRows, Row, natural
from areal_async.monitor.top.view import KEPT_S, TopView

pytestmark = pytest.mark.anyio

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
            {"id": "0-1", "version": "1-9", "is_fenced": True, "reason": "starting", "failure": "ended by SIGKILL",
             "waits_for": "weights"},
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
    view.take_reports({("node", "0"): _node(), ("controller", "0"): {"max_staleness": 2, "admitted": 64}}, now_s=10)
    view.add_step({"step": 2, "reward_mean": 0.25})
    view.add_step(
        {
            "step": 3, "reward_mean": 0.75, "staleness_tokens/0": 300, "staleness_tokens/2": 100, "staleness_max": 2,
            "num_tokens": 120, "time_step_s": 2.5, "time_wait_data_s": 0.5, "time_train_s": 1.5, "time_weights_s": 0.1,
        }
    )  # fmt: skip
    return view


def _rows(view: TopView, pane: str) -> list[tuple[str, ...]]:
    view.place = list(PANES).index(pane)
    return [row.cells for row in view.rows()]


def _lines(pilot: Pilot[Any]) -> list[str]:
    """Return what stands on the terminal."""
    strips = pilot.app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip) for strip in strips]


@asynccontextmanager
async def _shown(view: TopView, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Pilot[Any]]:
    """``top`` in a terminal of that size, as drawn; its orders are answered by their own name."""

    async def order(name: str) -> str:
        return f"ordered {name}"

    async with TopApp(view, order=order).run_test(size=size) as pilot:
        await _redraw(pilot)
        yield pilot


async def _redraw(pilot: Pilot[Any]) -> list[str]:
    """Have everything drawn that was told meanwhile; return what stands there."""
    await pilot.pause()
    pilot.app._draw()  # type: ignore[attr-defined]  # as it does every second
    await pilot.pause()
    return _lines(pilot)


async def _press(pilot: Pilot[Any], *keys: str) -> list[str]:
    """Press keys; return what stands there then."""
    await pilot.press(*keys)
    return await _redraw(pilot)


async def _drawn(view: TopView, size: tuple[int, int] = (80, 24)) -> list[str]:
    async with _shown(view, size) as pilot:
        return _lines(pilot)


@pytest.mark.parametrize("size", [(80, 24), (200, 50), (MIN_WIDTH, MIN_HEIGHT), (81, 37)])
async def test_every_pane_fills_the_terminal_and_nothing_goes_over_its_edge(
    view: TopView, size: tuple[int, int]
) -> None:
    statuses = [
        None,
        _status(shares={LONG: 0.5, "other": 0.5}),
        _status(notes=[LONG] * 9, members=_status().members * 40, reason=LONG, queue={}),
    ]
    async with _shown(view, size) as pilot:
        for status, pane in itertools.product(statuses, range(len(PANES))):
            view.status = status
            lines = await _press(pilot, str(pane + 1), "end")

            assert [cell_len(line) for line in lines] == [size[0]] * size[1]
            assert lines[-1].startswith("q quit")
            assert (status is None) == lines[0].startswith("asking")
            if status is not None:
                (tabs,) = [line for line in lines if line.startswith(" 1 processes")]
                assert f"by {view.sort_name}" in tabs or size[0] <= 81
            if status is not None and pane < len(view.panes):
                assert view.pane_name == list(PANES)[pane]


async def test_a_terminal_that_is_too_small_says_what_is_needed_and_one_that_grows_shows_more(view: TopView) -> None:
    async with _shown(view, (20, 5)) as pilot:
        assert _lines(pilot)[0].strip() == f"top needs {MIN_WIDTH} x {MIN_HEIGHT}"

        await pilot.resize_terminal(80, 24)
        lines = await _redraw(pilot)
        assert lines[0].startswith("run gsm8k: running")
        assert not any("last events" in line for line in lines)

        await pilot.resize_terminal(120, 40)
        lines = await _redraw(pilot)
        assert len(lines) == 40
        (place,) = [place for place, line in enumerate(lines) if "last events" in line]
        assert "weights.announced" in lines[place + 1]
        assert "role.lost" in lines[place + 2]
        assert not any("last events" in line for line in await _press(pilot, "5"))

        await pilot.resize_terminal(80, 24)
        assert len(await _redraw(pilot)) == 24


async def test_values_of_any_length_and_of_any_bytes_stay_in_their_place(view: TopView) -> None:
    evil = "\x1b[2J\x1b]0;x\x07\n\u202e" + "名" * 4000
    member = Member(role="trainer", instance=evil, presence=MISSING, why=evil, state=evil, waits_for=evil)
    server = {"id": evil, "version": evil, "is_fenced": True, "reason": evil, "failure": evil}
    view.status = _status(
        reason=evil,
        weights_version=evil,
        members=[member],
        servers=[server],
        notes=[evil],
        shares={evil: 1.0, "b": 0.0},
    )
    view.take_reports({("node", evil): {"waits": {"records": [[f"group {evil}", evil, evil, 1.0, 1.0, 0]]}}}, now_s=10)
    view.events.append({"event": evil, "at": evil, "reason": evil})

    async with _shown(view, (200, 50)) as pilot:
        for pane in range(len(PANES)):
            lines = await _press(pilot, str(pane + 1))
            assert [cell_len(line) for line in lines] == [200] * 50
            assert not any(character in line for line in lines for character in "\x1b\x07\n\u202e")
            assert any("␛[2J" in line for line in lines[9:20]), view.pane_name


async def test_the_head_tells_reward_speed_staleness_and_queue(view: TopView) -> None:
    view.take_reports({("node", "0"): _node(num_scored=50)}, now_s=12)

    text = "\n".join(await _drawn(view, (120, 30)))

    for piece in ("0.750, last 2: 0.500, evaluation 0.250  ▁█",
                  "1200 tokens/s generated, 80 trained, 25.0 trajectories/s",
                  "2.5 s: 0.5 waiting for data, 1.5 training, 0.1 weights",
                  "0 █████████ 75 %  2 ███ 25 %  of at most 2", "48 in flight (2 running)", "16 tickets (4.0 MB)",
                  "no alarm", KEYS.format(num_panes=5)):  # fmt: skip
        assert piece in text, text


async def test_alarms_stand_in_the_head_and_more_than_fit_are_counted(view: TopView) -> None:
    view.status = _status(notes=["one", "two", "three", "four", "five"])

    shown = [line.rstrip() for line in await _drawn(view) if line.startswith("!")]

    assert shown == ["! one", "! two", "! and 3 alarms more"]


async def test_keys_turn_the_panes_sort_them_and_give_orders(view: TopView) -> None:
    async with _shown(view) as pilot:
        for keys, pane in ((("2",), "servers"), (("right",), "waits"), (("tab",), "leases"), (("left",), "waits"),
                           (("5", "right"), "processes"), (("left",), "events"), (("6",), "events")):  # fmt: skip
            await _press(pilot, *keys)
            assert view.pane_name == pane
        assert any("by oldest" in line for line in await _press(pilot, "s"))
        assert (await _press(pilot, "p"))[-1].startswith("ordered pause")
        assert (await _press(pilot, "r"))[-1].startswith("ordered resume")
        await _press(pilot, "x", "delete", "ctrl+right")
        assert pilot.app.is_running, "a key without a meaning is none"


@pytest.mark.parametrize(("key", "ended_by"), [("q", None), ("ctrl+c", signal.SIGINT)])
async def test_two_keys_leave(view: TopView, key: str, ended_by: signal.Signals | None) -> None:
    async with _shown(view) as pilot:
        await pilot.press(key)
        await pilot.pause()
        assert not pilot.app.is_running
        assert pilot.app.return_value == ended_by


async def test_what_is_told_is_drawn_by_itself(view: TopView) -> None:
    async with _shown(view) as pilot:
        view.status = _status(state="paused")
        pilot.app.draw_soon()  # type: ignore[attr-defined]
        await pilot.pause(3 * MIN_PAUSE_S)
        assert _lines(pilot)[0].startswith("run gsm8k: paused")


def test_servers_tell_their_speed_and_are_sorted_by_trouble_load_speed_and_version(view: TopView) -> None:
    by_sort = {}
    for _ in PANES["servers"].sorts:
        view.place = list(PANES).index("servers")
        by_sort[view.sort_name] = _rows(view, "servers")
        view.sort_next()

    assert by_sort["name"][0] == ("0-0", "1-10", "1100", "7/64", "52", "900", "4", "50", "serves")
    assert by_sort["name"][1] == (
        "0-1", "1-9", "100", "9", "", "0", "0", "",
        "fenced: starting, waits for weights (last failure: ended by SIGKILL)",
    )  # fmt: skip
    assert [row[0] for row in by_sort["trouble"]] == ["0-1", "0-0"], "the fenced one first"
    assert [row[0] for row in by_sort["load"]] == ["0-1", "0-0"]
    assert [row[0] for row in by_sort["tokens/s"]] == ["0-0", "0-1"]
    assert [row[1] for row in by_sort["version"]] == ["1-9", "1-10"]


def test_names_are_in_the_order_of_their_numbers_however_many_digits_these_have() -> None:
    names = ["0-10", "0-2", "1-0", "a", "9" * 5000, "1" + "0" * 5000]

    assert sorted(names, key=natural) == ["0-2", "0-10", "1-0", "9" * 5000, "1" + "0" * 5000, "a"]


@pytest.mark.parametrize("number", [10**400, "soon", None, {}])
def test_a_number_of_a_server_that_is_none_leaves_its_row_as_it_is(view: TopView, number: object) -> None:
    server = {"id": "0-0", "version": "1-2", "is_fenced": False, "reason": ""}
    view.status = _status(servers=[server])
    said = {"first_token_mean_s": number, "num_requests": number}
    view.take_reports({("node", "0"): {"servers": {"0-0": said}}}, now_s=10)

    ((name, version, *_, state),) = _rows(view, "servers")

    assert (name, version, state) == ("0-0", "1-2", "serves")


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
    view.take_reports({("node", "0"): answer}, now_s=11)
    assert [row[2] for row in _rows(view, "waits")] == ["group 0-3-0"]
    assert [row[3] for row in _rows(view, "leases")] == ["0-3-0"]
    view.end()
    assert _rows(view, "waits") == []


def test_waits_and_leases_of_one_answer_are_each_as_they_are_sorted_now(view: TopView) -> None:
    records = [["group 0-1-0", "reward", "", 9.0, 1.0, 0], ["group 0-2-0", "reward", "", 2.0, 2.0, 0]]
    view.take_reports({("node", "0"): _node() | {"waits": {"records": records}}}, now_s=11)

    assert [row[2] for row in _rows(view, "waits")] == ["group 0-2-0", "group 0-1-0"], (
        "the one without news the longest"
    )
    view.sort_next()
    assert [row[2] for row in _rows(view, "waits")] == ["group 0-1-0", "group 0-2-0"], "the oldest"
    assert [row[3] for row in _rows(view, "leases")] == ["0-1-0", "0-2-0"], "the oldest, in columns of their own"


async def test_tasks_tell_share_changed_ratio_and_reward_and_have_a_pane_where_there_are_several() -> None:
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
    shown = [line.rstrip() for line in await _drawn(view)]
    assert "share  ratio now  groups  reward  task   reward in each step" in shown
    assert shown[-1] == KEYS.format(num_panes=6)

    view.status = _status()  # the controller, which knows the shares, does not answer
    assert [row[:2] for row in _rows(view, "tasks")] == [("", "")] * 3


async def test_a_run_of_one_task_has_no_pane_of_tasks(view: TopView) -> None:
    async with _shown(view) as pilot:
        lines = await _press(pilot, "5", "right")

        assert view.pane_name == "processes", "past the last comes the first"
        assert not any("tasks" in line for line in lines)


def test_a_pane_of_tasks_that_there_are_no_more_gives_way_to_the_last_one() -> None:
    """As when the run is started anew with a single one."""
    view = TopView(status=_status(shares={"gsm8k": 0.5, "code": 0.5}))
    view.place = list(PANES).index("tasks")
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
    assert view.sort_name == next(iter(PANES["events"].sorts))

    trainer = next(row for row in _rows(view, "processes") if row[0] == "trainer 0")
    assert (trainer[1], trainer[5]) == (MISSING, "trainer-0 ended by SIGKILL")


def test_an_answer_stands_for_a_process_that_is_late_until_it_is_too_old(view: TopView) -> None:
    late = view.take_reports({("controller", "0"): {}}, now_s=10 + KEPT_S)
    assert ("node", "0") in late

    gone = view.take_reports({("controller", "0"): {}}, now_s=10.1 + KEPT_S)
    assert ("node", "0") not in gone


def test_a_step_that_is_trained_again_replaces_the_first(view: TopView) -> None:
    view.add_step({"step": 2, "reward_mean": 0.3})

    assert [(line["step"], line["reward_mean"]) for line in view.steps] == [(2, 0.3)]


async def test_the_help_covers_every_key_and_is_scrolled_where_it_is_longer_than_the_screen(view: TopView) -> None:
    async with _shown(view, (100, 40)) as pilot:
        shown = [line.rstrip() for line in await _press(pilot, "question_mark")]
        assert all(line in shown for line in HELP)
        assert not any("by trouble" in line for line in shown)

        await pilot.resize_terminal(80, 24)
        assert not any("last ten steps" in line for line in await _redraw(pilot))
        assert any("last ten steps" in line for line in await _press(pilot, "end"))
        assert any("by trouble" in line for line in await _press(pilot, "question_mark"))


async def test_a_filter_leaves_the_rows_that_have_its_text_and_is_typed_changed_kept_and_dropped(view: TopView) -> None:
    async with _shown(view) as pilot:
        foot = (await _press(pilot, "slash", *"TRAx"))[-1]
        assert foot.startswith("/TRAx")
        assert foot.rstrip().endswith(TYPING)
        assert list(view.rows()) == []
        await _press(pilot, "backspace", "q", "2", "backspace", "backspace")
        assert pilot.app.is_running, "letters are typed"
        assert view.pane_name == "processes"
        foot = (await _press(pilot, "enter"))[-1]

        assert [row.cells[0] for row in view.rows()] == ["trainer 0"]
        assert foot.startswith("only with 'TRA', Esc for all  q quit")
        assert (await _press(pilot, "escape"))[-1].startswith("q quit")
        assert len(view.rows()) == 3

        assert (await _press(pilot, "slash", *"a/b", "tab"))[-1].startswith("/a/b")
        await _press(pilot, "escape")
        assert view.filter == ""
        assert view.pane_name == "processes"


async def test_keys_that_come_in_one_burst_are_typed_into_the_filter_that_they_begin(view: TopView) -> None:
    async with _shown(view) as pilot:
        for key in ("slash", *"rsp", "enter", "2"):
            pilot.app.post_message(events.Key(key, key if len(key) == 1 else None))
        foot = (await _redraw(pilot))[-1]

        assert foot.startswith("only with 'rsp'"), foot
        assert view.pane_name == "servers"


async def test_a_narrow_terminal_leaves_out_what_matters_least_and_a_wide_one_shows_all(view: TopView) -> None:
    async with _shown(view) as pilot:
        await pilot.press("2")

        async def heads(width: int) -> str:
            await pilot.resize_terminal(width, 24)
            return next(line for line in await _redraw(pilot) if line.startswith("server "))

        assert (await heads(80)).split() == ["server", "version", "tokens/s", "requests", "first", "ms", "state"]
        wide = await heads(200)
        assert all(name in wide for name in ("first ms", "tokens due", "swaps", "swap ms"))


async def test_how_much_is_out_of_sight_is_said_and_scrolling_stays_within_the_rows() -> None:
    nodes = [Member(role="node", instance=str(index), presence=OK, state="runs") for index in range(64)]
    view = TopView(status=_status(members=nodes))
    assert [row.cells[0] for row in view.rows()][:11][-2:] == ["node 9", "node 10"]

    async with _shown(view) as pilot:

        async def tabs(*keys: str) -> str:
            (line,) = [line for line in await _press(pilot, *keys) if " 1 processes " in line]
            return line.rstrip()

        assert (await tabs("up")).endswith("1-13 of 64  by trouble")
        assert (await tabs("pagedown")).endswith("11-23 of 64  by trouble")
        assert any(line.startswith("node 10 ") for line in _lines(pilot))
        assert (await tabs("down", "down", "up")).endswith("12-24 of 64  by trouble")
        assert (await tabs("end", "down")).endswith("52-64 of 64  by trouble")
        assert any(line.startswith("node 63") for line in _lines(pilot))
        assert (await tabs("pageup")).endswith("42-54 of 64  by trouble")
        assert (await tabs("s")).endswith("1-13 of 64  by name"), "sorted anew, it begins at the top"
        assert (await tabs("end", "home")).endswith("1-13 of 64  by name")

        await pilot.press("end")
        view.status = _status(members=nodes[:20])
        assert (await tabs()).endswith("8-20 of 20  by name"), "the last of those that there still are"


async def test_without_its_broker_the_last_that_is_known_is_shown_and_said_to_be_old(view: TopView) -> None:
    view.lose_broker("not within 2 s")

    text = "\n".join(await _drawn(view, (100, 24)))

    assert "run gsm8k: no broker" in text
    assert "! the broker does not answer (not within 2 s); what stands here was said before" in text


async def test_of_a_run_that_has_ended_nobody_is_missed_and_its_steps_stay(view: TopView) -> None:
    view.end()

    text = "\n".join(await _drawn(view, (100, 24)))

    assert "run gsm8k: ended  step 3/200" in text
    assert "status --run gsm8k tells how" in text
    assert "no alarm" in text
    assert "no answer" not in text
    assert "0.750, last 2: 0.500" in text


async def test_a_run_that_said_how_it_has_ended_is_not_said_to_miss_its_broker(view: TopView) -> None:
    view.status = _status(state="failed", reason="reward: KeyError")
    view.lose_broker("not within 2 s")
    view.end()

    text = "\n".join(await _drawn(view, (100, 24)))

    assert "run gsm8k: failed" in text
    assert "(reward: KeyError)" in text
    assert "broker does not answer" not in text


async def test_without_its_controller_the_books_are_not_said_to_be_empty(view: TopView) -> None:
    view.take_reports({("node", "0"): _node()}, now_s=11 + KEPT_S)

    text = "\n".join(await _drawn(view, (100, 24)))

    assert "the controller keeps the books, and does not answer" in text
    assert "in flight" not in text


async def test_why_nothing_is_known_yet_is_in_sight_until_something_is() -> None:
    view = TopView()
    async with _shown(view) as pilot:
        assert _lines(pilot)[0].rstrip() == "asking ..."

        view.lose_broker("not within 2 s")
        assert (await _redraw(pilot))[0].rstrip() == "asking ... (not within 2 s)"

        view.status = _status()
        assert (await _redraw(pilot))[0].startswith("run gsm8k: running")
