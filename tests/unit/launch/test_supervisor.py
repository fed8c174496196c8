"""Process groups live, are restarted, give up and are stopped as promised; they are real, their work is not."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from areal_async.errors import PipelineError, UserError
from areal_async.launch.backend import ProcessSpec
from areal_async.launch.local import LocalBackend, LocalProcess
from areal_async.launch.process_group import Death
from areal_async.launch.supervisor import ProcessGroup, RunEnd, RunSupervisor
from tests.brokers import until

pytestmark = pytest.mark.anyio

DEADLINE_S = 60
"""A supervisor that hangs is to fail its test, and to end its processes."""
SERVE = "import time; time.sleep(600)"
"""Works until it is ended."""
ENDS_WHEN_ASKED = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("asked", flush=True), sys.exit(0)))
print("ready", flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("ready", flush=True)
while True:
    time.sleep(600)
"""


def _fails_first(times: int, *, last: str = "pass") -> str:
    """Code that exits 1 for so many starts, counted by the lines of its own output, then does ``last``."""
    return (
        "import os, sys\n"
        "starts = len(open(os.environ['OUTPUT']).readlines())\n"
        "print('start', flush=True)\n"
        f"if starts < {times}: sys.exit(1)\n"
        f"{last}\n"
    )


class _Stage:
    """A supervisor over groups of one-line programs, and what it told."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.groups: list[ProcessGroup] = []
        self.told: list[str] = []
        self.failure: str | None = None
        self.backend = _WatchedBackend()
        self.supervisors: list[RunSupervisor] = []

    def add(
        self,
        name: str,
        *codes: str,
        max_restarts: int = 5,
        ends_run: bool = False,
        may_finish: bool = False,
        stop_deadline_s: float = 20.0,
        work_done: Callable[[], int] | None = None,
        excuse: Callable[[Death], str | None] | None = None,
        is_outdated: Callable[[Sequence[str]], bool] | None = None,
    ) -> None:
        def make_specs() -> Sequence[ProcessSpec]:
            names = [name] if len(codes) == 1 else [f"{name}-{rank}" for rank in range(len(codes))]
            return [
                ProcessSpec(
                    name=process,
                    command=(sys.executable, "-S", "-c", code),
                    environment={"OUTPUT": str(self.output(process))},
                    output=self.output(process),
                )
                for process, code in zip(names, codes, strict=True)
            ]

        self.groups.append(
            ProcessGroup(
                name=name,
                make_specs=make_specs,
                max_restarts=max_restarts,
                work_done=work_done,
                excuse=excuse,
                is_outdated=is_outdated,
                stop_deadline_s=stop_deadline_s,
                ends_run=ends_run,
                may_finish=may_finish,
            )
        )

    def output(self, process: str) -> Path:
        return self.directory / f"{process}.out"

    def lines(self, process: str) -> list[str]:
        """Return the lines that have ended; a process writes its line and the end of it apart."""
        return self.output(process).read_text().split("\n")[:-1] if self.output(process).exists() else []

    async def run(self) -> RunEnd:
        async def read_failure() -> str | None:
            return self.failure

        supervisor = RunSupervisor(
            self.groups,
            backend=self.backend,
            notify=self.told.append,
            read_failure=read_failure,
        )
        self.supervisors.append(supervisor)
        with anyio.fail_after(DEADLINE_S):
            return await supervisor.run()

    async def run_and_signal(self, *steps: tuple[Callable[[], bool], signal.Signals]) -> RunEnd:
        """Run, and send each signal to this process once its condition holds."""
        end: RunEnd | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send_signals, steps)
            end = await self.run()
            tasks.cancel_scope.cancel()
        assert end is not None
        return end


class _WatchedBackend(LocalBackend):
    """Remembers what it started."""

    def __init__(self) -> None:
        self.started: list[LocalProcess] = []
        self.num_asked = 0

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        self.num_asked += 1
        self.started.append(await super().start(spec))
        return self.started[-1]


class _SlowBackend(_WatchedBackend):
    """Starts nothing before the user has been told something."""

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self._told = told

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        self.num_asked += 1
        await until(lambda: bool(self._told))
        return await super().start(spec)


async def _send_signals(steps: Sequence[tuple[Callable[[], bool], signal.Signals]]) -> None:
    for condition, number in steps:
        await until(condition)
        os.kill(os.getpid(), number)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Stage:
    monkeypatch.setattr("areal_async.launch.supervisor.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("areal_async.launch.process_group.FAREWELL_S", 0.5)
    return _Stage(tmp_path)


async def _assert_all_ended(stage: _Stage) -> None:
    with anyio.fail_after(DEADLINE_S):  # what still works does so for longer
        for process in stage.backend.started:
            await process.wait()


async def test_run_ends_when_the_controller_exits_and_nothing_is_left(stage: _Stage) -> None:
    stage.add("trainer", "pass", may_finish=True)
    stage.add("node", SERVE)
    stage.add("controller", "pass", ends_run=True)

    assert await stage.run() is RunEnd.FINISHED

    await _assert_all_ended(stage)


async def test_process_that_died_is_started_again(stage: _Stage) -> None:
    stage.add("node", SERVE)
    stage.add("controller", _fails_first(2), ends_run=True)

    assert await stage.run() is RunEnd.FINISHED

    assert stage.lines("controller") == ["start"] * 3
    assert "controller ended with status 1: start; starting controller again (restart 1 of 5)" in stage.told


async def test_exit_0_of_a_process_that_has_no_end_of_its_own_is_a_death(stage: _Stage) -> None:
    stage.add("node", "pass", max_restarts=1)
    stage.add("controller", SERVE, ends_run=True)

    with pytest.RaisesGroup(pytest.RaisesExc(PipelineError, match="nobody asked it to end")):
        await stage.run()


async def test_a_process_group_that_dies_too_often_ends_the_run_with_its_cause(stage: _Stage) -> None:
    stage.add("node", "raise RuntimeError('no memory')", max_restarts=2)
    stage.add("controller", SERVE, ends_run=True)

    with pytest.RaisesGroup(
        pytest.RaisesExc(
            PipelineError,
            match=r"node: died 3 times in 10 minutes, need at most 2; last, node ended with status 1: "
            r"RuntimeError: no memory; see .*node.out",
        )
    ):
        await stage.run()

    await _assert_all_ended(stage)


async def test_deaths_before_work_that_lasts_are_forgotten(stage: _Stage) -> None:
    def work_done() -> int:
        return len(stage.lines("trainer")) // 2

    stage.add("trainer", _fails_first(5), max_restarts=2, may_finish=True, work_done=work_done)
    output = repr(str(stage.output("trainer")))
    has_started = f"os.path.exists({output}) and len(open({output}).readlines()) == 6"
    stage.add("controller", f"import os, time\nwhile not ({has_started}): time.sleep(0.01)", ends_run=True)

    assert await stage.run() is RunEnd.FINISHED

    restarts = [line.rpartition("(")[2] for line in stage.told if "starting trainer again" in line]
    assert restarts == [f"restart {number} of 2)" for number in (1, 1, 2, 1, 2)]


async def test_after_a_run_has_gone_back_work_counts_from_there(stage: _Stage) -> None:
    done = {1: 20, 2: 10, 3: 11}
    stage.add("trainer", _fails_first(3), may_finish=True, work_done=lambda: done[len(stage.lines("trainer"))])
    stage.add("controller", SERVE, ends_run=True)

    end = await stage.run_and_signal((lambda: len(stage.lines("trainer")) == 4, signal.SIGINT))

    assert end is RunEnd.STOPPED
    restarts = [line.rpartition("(")[2] for line in stage.told if "starting trainer again" in line]
    assert restarts == [f"restart {number} of 5)" for number in (1, 2, 1)]


async def test_a_process_group_that_gets_no_further_is_given_up_however_much_it_did_before(stage: _Stage) -> None:
    stage.add("trainer", "raise RuntimeError('no memory')", max_restarts=2, work_done=lambda: 7)
    stage.add("controller", SERVE, ends_run=True)

    with pytest.RaisesGroup(
        pytest.RaisesExc(PipelineError, match="trainer: died 3 times in 10 minutes without getting any further")
    ):
        await stage.run()


async def test_a_death_with_an_excuse_does_not_count_and_is_told(stage: _Stage) -> None:
    stage.add("node", SERVE)
    stage.add(
        "controller", _fails_first(3), ends_run=True, max_restarts=0, excuse=lambda death: f"a slot, {death.name}"
    )

    assert await stage.run() is RunEnd.FINISHED

    assert stage.told.count("a slot, controller; starting controller again") == 3


async def test_excuses_without_end_and_without_lasting_work_count_at_last(
    stage: _Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.launch.supervisor.MAX_EXCUSED", 2)
    stage.add("controller", "raise SystemExit(1)", ends_run=True, max_restarts=0, excuse=lambda death: "a slot")

    with pytest.RaisesGroup(pytest.RaisesExc(PipelineError, match="died 1 times")):
        await stage.run()

    assert len(stage.backend.started) == 3


async def test_a_host_that_is_gone_is_waited_for_and_used_once_it_is_back(stage: _Stage) -> None:
    stage.add("controller", "pass", ends_run=True)
    place = stage.groups[0].make_specs
    stage.groups[0] = replace(stage.groups[0], make_specs=lambda: [replace(spec, host="b") for spec in place()])
    stage.backend.absent = gone = {"b": "its agent is silent"}

    async with anyio.create_task_group() as tasks:

        async def come_back() -> None:
            await until(lambda: bool(stage.told))
            assert stage.backend.started == []
            gone.clear()

        tasks.start_soon(come_back)
        assert await stage.run() is RunEnd.FINISHED

    assert stage.told[0] == "controller waits for host b: its agent is silent"
    assert len(stage.backend.started) == 1


async def test_a_stop_ends_the_wait_for_a_host(stage: _Stage) -> None:
    stage.add("controller", "pass", ends_run=True)
    place = stage.groups[0].make_specs
    stage.groups[0] = replace(stage.groups[0], make_specs=lambda: [replace(spec, host="b") for spec in place()])
    stage.backend.absent = {"b": "its agent is silent"}

    assert await stage.run_and_signal((lambda: bool(stage.told), signal.SIGINT)) is RunEnd.STOPPED
    assert stage.backend.started == []


async def test_mistake_of_the_user_ends_the_run_at_once_with_its_sentence(stage: _Stage) -> None:
    stage.add("node", SERVE)
    stage.add(
        "controller", "import sys; print('dataset: no column answer', file=sys.stderr); sys.exit(2)", ends_run=True
    )

    with pytest.RaisesGroup(pytest.RaisesExc(UserError, match="^dataset: no column answer$")):
        await stage.run()

    assert len(stage.lines("controller")) == 1
    await _assert_all_ended(stage)


async def test_run_declared_failed_ends_with_the_declared_reason(stage: _Stage) -> None:
    stage.failure = "20 groups failed, one after another; the last: boom"
    stage.add("controller", "raise SystemExit(1)", ends_run=True)

    with pytest.RaisesGroup(pytest.RaisesExc(PipelineError, match="^20 groups failed")):
        await stage.run()


async def test_all_ranks_are_started_again_when_one_dies(stage: _Stage) -> None:
    other = repr(str(stage.output("trainer-1")))
    stage.add(
        "trainer",
        f"import os, time\nwhile not (os.path.exists({other}) and os.path.getsize({other})): time.sleep(0.01)\n"
        + _fails_first(1),  # the other is ended with it, so not before it has written that it started
        _fails_first(0, last="import time; time.sleep(0 if starts else 600)"),
        may_finish=True,
    )
    stage.add(
        "controller",
        "import time\n"
        f"paths = {[str(stage.output(f'trainer-{rank}')) for rank in (0, 1)]}\n"
        "while True:\n"
        "    try:\n"
        "        if all(len(open(path).readlines()) == 2 for path in paths): break\n"
        "    except FileNotFoundError: pass\n"
        "    time.sleep(0.01)\n",
        ends_run=True,
    )

    assert await stage.run() is RunEnd.FINISHED

    assert stage.lines("trainer-0") == ["start"] * 2
    assert stage.lines("trainer-1") == ["start"] * 2


async def test_rank_that_ends_later_may_still_name_the_users_mistake(stage: _Stage) -> None:
    blames = "import sys, time; time.sleep(0.2); print('model.path: no model', file=sys.stderr); sys.exit(2)"
    stage.add("trainer", "raise RuntimeError('connection closed by peer')", blames, may_finish=True)
    stage.add("controller", SERVE, ends_run=True)

    with pytest.RaisesGroup(pytest.RaisesExc(UserError, match="^model.path: no model$")):
        await stage.run()


async def test_first_signal_stops_one_process_group_after_the_other_in_order(stage: _Stage) -> None:
    log = stage.directory / "order"
    names = ["trainer", "node", "controller"]
    for name in names:
        stage.add(
            name,
            "import signal, sys, time\n"
            f"def end(*_): open({str(log)!r}, 'a').write({name!r} + '\\n'); sys.exit(0)\n"
            "signal.signal(signal.SIGTERM, end)\n"
            "print('ready', flush=True)\n"
            "time.sleep(600)\n",
            ends_run=name == "controller",
            may_finish=name == "trainer",
        )

    end = await stage.run_and_signal((lambda: all(stage.lines(name) for name in names), signal.SIGINT))

    assert end is RunEnd.STOPPED
    assert log.read_text().split() == names


async def test_stop_asks_the_first_rank_alone(stage: _Stage) -> None:
    follower = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "print('ready', flush=True)\n"
        f"while 'asked' not in open({str(stage.output('trainer-0'))!r}).read(): time.sleep(0.01)\n"
    )
    stage.add("trainer", ENDS_WHEN_ASKED, follower, may_finish=True)

    end = await stage.run_and_signal(
        (lambda: all("ready" in stage.lines(f"trainer-{rank}") for rank in (0, 1)), signal.SIGTERM)
    )

    assert end is RunEnd.STOPPED
    assert stage.lines("trainer-0") == ["ready", "asked"]
    assert stage.lines("trainer-1") == ["ready"]


async def test_a_process_group_that_does_not_end_in_time_is_killed(stage: _Stage) -> None:
    stage.add("trainer", STUBBORN, may_finish=True, stop_deadline_s=0.05)

    end = await stage.run_and_signal((lambda: "ready" in stage.lines("trainer"), signal.SIGINT))

    assert end is RunEnd.STOPPED
    assert "trainer did not end within 0.05 s; killing it" in stage.told
    await _assert_all_ended(stage)


async def test_second_signal_kills_everything_now(stage: _Stage) -> None:
    stage.add("trainer", STUBBORN, may_finish=True)
    stage.add("controller", SERVE, ends_run=True)

    end = await stage.run_and_signal(
        (lambda: "ready" in stage.lines("trainer"), signal.SIGINT),
        (lambda: "asked" in stage.lines("trainer"), signal.SIGINT),
    )

    assert end is RunEnd.KILLED
    await _assert_all_ended(stage)


async def test_stop_ends_the_pause_before_a_restart_and_nothing_is_started_again(
    stage: _Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.launch.supervisor.FIRST_PAUSE_S", 3600)
    stage.add("node", "raise SystemExit(1)", stop_deadline_s=5)
    stage.add("controller", SERVE, ends_run=True)

    end = await stage.run_and_signal((lambda: any("restart 1" in line for line in stage.told), signal.SIGINT))

    assert end is RunEnd.STOPPED
    assert not any("killing" in line for line in stage.told)
    assert [process.spec.name for process in stage.backend.started].count("node") == 1


async def test_stop_reaches_a_process_that_is_being_started(stage: _Stage) -> None:
    stage.backend = _SlowBackend(stage.told)
    stage.add("trainer", SERVE, may_finish=True)

    end = await stage.run_and_signal((lambda: stage.backend.num_asked == 1, signal.SIGINT))

    assert end is RunEnd.STOPPED
    assert len(stage.told) == 1  # it did not have to be killed
    await _assert_all_ended(stage)


async def test_killed_process_is_not_blamed_on_what_it_wrote_last(stage: _Stage) -> None:
    stage.add("node", "import os; print('all is well', flush=True); os.kill(os.getpid(), 9)", max_restarts=0)
    stage.add("controller", SERVE, ends_run=True)

    with pytest.RaisesGroup(pytest.RaisesExc(PipelineError, match="last, node ended by SIGKILL; see .*node.out")):
        await stage.run()


async def test_death_while_stopping_is_told_and_not_mended(stage: _Stage) -> None:
    stage.add(
        "trainer",
        "import signal, sys, time\n"
        "def fail(*_): sys.exit('disk full')\n"
        "signal.signal(signal.SIGTERM, fail)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n",
        may_finish=True,
    )

    end = await stage.run_and_signal((lambda: "ready" in stage.lines("trainer"), signal.SIGINT))

    assert end is RunEnd.STOPPED
    assert "while stopping, trainer ended with status 1: disk full" in stage.told
    assert len(stage.backend.started) == 1


async def test_a_process_group_that_is_frozen_is_killed_and_started_again_when_asked_to(stage: _Stage) -> None:
    stage.add("node", SERVE)
    stage.add("controller", "import time, os, pathlib\nwhile not pathlib.Path(os.environ['OUTPUT'] + '.go').exists(): "
              "time.sleep(0.01)", ends_run=True)  # fmt: skip

    async def freeze_and_restart() -> None:
        await until(lambda: len(stage.backend.started) == 2)
        os.kill(next(one for one in stage.backend.started if one.spec.name == "node").pid, signal.SIGSTOP)
        stage.supervisors[0].restart("node")
        await until(lambda: len(stage.backend.started) == 3)
        (stage.directory / "controller.out.go").touch()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(freeze_and_restart)
        assert await stage.run() is RunEnd.FINISHED

    assert [stage.supervisors[0].num_starts(name) for name in ("node", "controller", "other")] == [2, 1, 0]
    assert any("node ended by SIGKILL; starting node again" in line for line in stage.told)


async def test_a_process_group_is_killed_and_started_anew_without_counting_as_a_death(stage: _Stage) -> None:
    stage.add("trainer", SERVE, SERVE, max_restarts=0)
    stage.add("controller", SERVE, ends_run=True)

    async def renew_twice() -> None:
        await until(lambda: bool(stage.supervisors))
        (supervisor,) = stage.supervisors
        for number in (1, 2):
            await until(lambda wanted=2 * number + 1: len(stage.backend.started) == wanted)
            supervisor.renew("trainer", "started anew")
        await until(lambda: len(stage.backend.started) == 7)
        os.kill(os.getpid(), signal.SIGINT)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(renew_twice)
        assert await stage.run() is RunEnd.STOPPED

    assert stage.supervisors[0].num_starts("trainer") == 3
    assert not any("starting trainer again" in line for line in stage.told)


async def test_groups_are_added_and_removed_while_the_run_runs_and_the_removed_are_not_started_again(
    stage: _Stage,
) -> None:
    for name in ("trainer", "node-0", "node-1", "controller"):
        stage.add(name, ENDS_WHEN_ASKED)
    node = stage.groups.pop(2)

    async def add_and_remove() -> None:
        await until(lambda: len(stage.backend.started) == 3)
        (supervisor,) = stage.supervisors
        supervisor.add(node)
        supervisor.add(node)
        await until(lambda: stage.lines("node-1") == ["ready"])
        await supervisor.remove("node-0")
        await supervisor.remove("node-0")
        assert stage.lines("node-0") == ["ready", "asked"]
        os.kill(os.getpid(), signal.SIGINT)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(add_and_remove)
        assert await stage.run() is RunEnd.STOPPED

    assert stage.lines("node-1") == ["ready", "asked"]
    assert [one.spec.name for one in stage.backend.started].count("node-0") == 1
    assert len(stage.backend.started) == 4


async def test_a_group_that_is_outdated_for_long_ends_in_good_order_and_begins_anew(
    stage: _Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.launch.supervisor.HOST_LOOK_S", 0.01)
    monkeypatch.setattr("areal_async.launch.supervisor.OUTDATED_S", 0.05)
    asked: list[list[str]] = []

    def is_outdated(hosts: Sequence[str]) -> bool:
        asked.append(list(hosts))
        return stage.lines("trainer") == ["ready"]

    stage.add("trainer", ENDS_WHEN_ASKED, may_finish=True, max_restarts=0, is_outdated=is_outdated)
    stage.add("controller", SERVE, ends_run=True)

    end = await stage.run_and_signal((lambda: stage.lines("trainer")[1:] == ["asked", "ready"], signal.SIGINT))

    assert end is RunEnd.STOPPED
    assert asked[0] == ["127.0.0.1"]
    assert stage.supervisors[0].num_starts("trainer") == 2
