"""A live run is watched in a terminal emulator, and the documents' chapters on operating it are done to it.

``top`` is legible at two sizes, with nothing beyond the edge, it is drawn anew by itself, and its keys work; it
outlives a broker or a controller that does not answer for a while, and tells the run's end. Whoever is killed stands in
``status`` with the reason, and its return too; the history keeps both. What is changed while the run is live outlives
all of that. Every command of "Operating a run" is run; every line of "With plain NATS tools", by the `nats` tool itself
where there is one on PATH, else by what makes the same requests (``nats_tool.py``); and its client, which knows nothing
of this package.
"""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import nats
import pytest

from areal_async.bus.streams import all_streams
from areal_async.launch.run import visit_live
from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.snapshot import NUM_READ, OK, read_events
from areal_async.protocol import events
from areal_async.protocol.subjects import Names
from areal_async.telemetry import wait_graph
from tests.documents import ROOT, blocks_of, chapter, commands
from tests.e2e.scene import Scene, broker_pid, died, has, is_back, look, server_pid, stopped
from tests.e2e.terminal import SHOWN_WITHIN_S, Terminal
from tests.e2e.test_run import DEADLINE_S, Run, assert_accounts, collect, role_processes, said_by, unhurried, wait_until

pytestmark = [pytest.mark.timeout(480), pytest.mark.whole_runs]

COLUMNS_80, COLUMNS_100, COLUMNS_200 = (80, 24), (100, 30), (200, 50)
TOLD_WITHIN_S = 60.0
BATCH_GROUPS = 4
"""Of ``Run``."""
VALUES = {
    "trainer.lr": 1e-5, "rollout.max_staleness": 1, "rollout.sampling.temperature": 0.8,
    "trainer.checkpoint_every_steps": 50,
}  # fmt: skip
"""What is changed while the run is live: the last of them has the trainer that is killed train steps again."""
STEERED = [f"{setting}={value}" for setting, value in VALUES.items()]
ORDERS = ("status", "top", "pause", "resume", "eval", "stop")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One run for all of this file, whose tests are its story; under the documents' name."""
    directory = tmp_path_factory.mktemp("operating") / "runs"
    directory.mkdir()
    run = Run(directory, "gsm8k", run__steps=5000)
    with run.start(workflow=unhurried(directory)) as process:
        run.wait_for_step(2, process)
        yield run
        with suppress(subprocess.TimeoutExpired):  # stopped by one of the tests, it still sums up
            process.wait(timeout=20)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        ended = collect(process)
    assert ended.returncode == 0, ended.stdout


def test_what_computes_nothing_does_without_torch_and_the_launcher_without_tables(live: Run) -> None:
    """To import either takes longer than all that they do before the first step."""
    (trainer,), (controller,), (node,) = (role_processes(live, role) for role in ("trainer", "controller", "node"))
    launcher = int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{controller}/status").read_text())[0])

    assert _libraries(trainer) == {"libtorch", "libarrow"}
    assert _libraries(controller) == {"libarrow"}
    assert _libraries(node) == set()
    assert _libraries(launcher) == set()


def _libraries(pid: int) -> set[str]:
    """Return those of torch and of pyarrow that a process has loaded."""
    return set(re.findall(r"/(libtorch|libarrow)\.so", Path(f"/proc/{pid}/maps").read_text()))


def test_a_run_is_watched_paused_and_resumed_on_a_screen_of_either_size(live: Run) -> None:
    run = live
    small = Terminal(COLUMNS_80, "--run", str(run.directory), "--by", "ann")
    small.wait(has("run gsm8k: running", "tokens/s generated", "controller 0", "trainer 0", "no alarm"), "the run")
    for row, name in enumerate(("reward", "speed", "a step", "staleness", "groups", "stored"), start=1):
        assert small.lines[row].startswith(name), small.text
    assert re.search(r"staleness.* █+ \d+ %", small.text), small.text
    assert small.lines[-1].startswith("q quit"), small.text

    small.press("2")
    small.wait(has("tokens/s  requests  first ms", "0-0", "serves"), "the servers")
    small.wait(lambda text: re.search(r"0-0 +1-\d+ +[1-9]\d* +\d+/\d+ +\d+ ", text) is not None, "its speed")
    small.press("\x1b[C")
    small.wait(has("who waits", "for what", "trainer"), "the waits")
    small.press("4")
    small.wait(lambda text: "waits for" in text and re.search(r"\d-\d+-\d", text) is not None, "the leases")
    small.press("5")
    small.wait(has("weights.announced", "by newest"), "the events")
    small.press("s")
    small.wait(has("by oldest", "role.started"), "the events, sorted")
    small.press("/role.st\r")
    small.wait(lambda text: "role.started" in text and "announced" not in text, "the events that are wanted")
    small.press("\x1b")
    small.wait(has("weights.announced"), "all of them")
    small.press("?")
    small.wait(has("leave; the run goes on"), "the help")
    small.press("?1")
    small.resize(120, 40)
    small.wait(has("last events", "waits for"), "the larger screen")
    small.resize(*COLUMNS_80)
    small.wait(lambda text: "last events" not in text and text.splitlines()[-1].startswith("q quit"), "the smaller one")

    small.press("p")
    small.wait(has("run gsm8k: paused", "by ann"), "the pause")
    assert small.wait(has("trainer 0", "waiting"), "the trainer's rest") < SHOWN_WITHIN_S
    screens = set()
    while len(screens) < 3:  # "... s ago" goes on: it is drawn anew though nothing moves
        small.wait(lambda text: text not in screens, "another screen")
        screens.add(small.text)
    small.press("q")
    assert small.wait_ended(within_s=DEADLINE_S) == 0

    wide = Terminal(
        COLUMNS_200, "--run", "gsm8k", "--bus.url", (run.directory / "bus" / "url").read_text().strip(),
        "--bus.credentials", str(run.directory / "credentials" / "operator.nk"),
    )  # fmt: skip
    wide.wait(has("run gsm8k: paused", "/5000", "of at most 2", "last events", "run.ordered"), "the run from afar")
    wide.press("r")
    wide.wait(has("run gsm8k: running"), "its order")
    wide.press("q")
    assert wide.wait_ended(within_s=DEADLINE_S) == 0


def test_top_says_who_does_not_answer_and_goes_on_when_they_do(live: Run) -> None:
    screen = Terminal(COLUMNS_100, "--run", str(live.directory))
    screen.wait(has("run gsm8k: running", "in flight"), "the run")

    (controller,) = role_processes(live, "controller")
    with stopped(controller):
        screen.wait(has("! controller 0 does not answer", "keeps the books, and does not answer"), "its absence")
    screen.wait(has("in flight", "no alarm"), "its return")

    with stopped(broker_pid(live)):
        screen.wait(has("run gsm8k: no broker", "what stands here was said before"), "the broker's absence")
    screen.wait(has("run gsm8k: running", "no alarm"), "the broker's return")
    screen.press("q")
    assert screen.wait_ended(within_s=DEADLINE_S) == 0


async def _ask(run: Run, subject: str) -> dict[str, Any]:
    async with _operator(run) as client:
        answer: dict[str, Any] = json.loads((await client.request(subject, b"", timeout=20)).data)
    return answer


def _asked(run: Run, role: str) -> dict[str, Any]:
    return asyncio.run(_ask(run, f"areal.gsm8k.status.{role}.0"))


def test_a_run_is_steered_while_all_its_roles_are_killed_and_each_is_missed_with_its_cause_and_seen_to_return(
    live: Run,
) -> None:
    run, scene = live, Scene(live)
    paused = asyncio.run(_ask(run, "areal.gsm8k.control.pause"))
    wait_until(lambda: _asked(run, "controller")["in_flight"] < BATCH_GROUPS, "too few groups for one more step")
    wait_until(lambda: _asked(run, "trainer")["state"] == "waiting", "the pause")
    while_paused = _status(run)
    assert paused["is_paused"] is True
    assert while_paused["state"] == "paused"
    wait_until(lambda: look(run).notes == [], "an answer of everybody within a second, and no alarm")

    scene.kill(
        "node",
        role_processes(run, "node"),
        lambda status: died(status, "node") and "node-0 ended by SIGKILL" in str(status.notes),
        lambda status: is_back(status, "node") and all(one.presence == OK for one in status.members),
    )

    assert run.lines[-1]["step"] == while_paused["step"]
    changes = [word for setting in STEERED for word in ("--set", setting)]
    steered = said_by("resume", run.directory, "--by", "ann", *changes)
    assert steered.returncode == 0, steered.stderr
    wait_until(lambda: [line["lr"] for line in run.lines[-2:]] == [1e-5] * 2, "two steps at the new rate")
    wait_until(lambda: run.lines[-1]["temperature_mean"] == 0.8, "a step whose tokens were all sampled at 0.8")

    scene.kill(
        "server",
        [server_pid(run)],
        lambda status: any(one["failure"] == "ended by SIGKILL" for one in status.servers),
        lambda status: not status.servers[0]["is_fenced"],
    )
    for role in ("broker", "controller", "trainer"):
        pids = role_processes(run, role) if role != "broker" else [broker_pid(run)]
        before = {line["step"]: (line["lr"], line["staleness_max"]) for line in run.lines}
        scene.kill(role, pids, lambda status, r=role: died(status, r), lambda status, r=role: is_back(status, r))

    print(f"seconds until it stood in status: {scene.told_s}")  # of at most 3 on a free machine; no test has a clock
    wait_until(
        lambda: asyncio.run(_of_roles(run))[-1]["event"] == "role.returned", "the event that the trainer is back"
    )
    lost = [one for one in asyncio.run(_of_roles(run)) if one["event"] == "role.lost"][-1]
    assert (lost["crew"], lost["reason"], lost["teller"]) == ("trainer", "trainer-0 ended by SIGKILL", "operator 0")
    _compare_after_the_trainer(run, before)


async def _of_roles(run: Run) -> list[dict[str, Any]]:
    """Return what the history has of roles, oldest first; ``status`` shows the newest events alone."""
    async with visit_live(RunDirectory(run.directory.absolute())) as (_, bus):
        return [one for one in await read_events(bus, limit=NUM_READ) if one["event"].startswith("role.")]


def _compare_after_the_trainer(run: Run, before: dict[int, tuple[float, int]]) -> None:
    """A step that is trained again after a crash is trained at the rate, and within the bound, that it was cut with."""
    wait_until(lambda: bool(run.lines) and run.lines[-1]["weights_version"].startswith("2-"), "the second trainer")
    wait_until(lambda: run.lines[-1]["step"] > max(before) + 1, "steps that were not trained before")
    after = {line["step"]: (line["lr"], line["staleness_max"]) for line in run.lines}
    assert {step: after[step] for step in before} == before
    assert max(after[step][1] for step in after if step > max(before) + 1) <= 1


GUIDE, BUS_GUIDE = "areal_async/cli/README.md", "areal_async/bus/README.md"
MONITOR_GUIDE = "areal_async/monitor/README.md"


def _blocks(file: str, language: str) -> list[str]:
    """Return the blocks that a document leaves to this file."""
    mark = f"run by {Path(__file__).relative_to(ROOT)}"
    return [one.body for one in blocks_of(file) if one.mark == mark and one.language == language]


TOLD = {
    "micro ls": "areal-controller(?s:.*)areal-|areal-(?s:.*)areal-controller",
    "micro info areal-controller": r"areal\.gsm8k\.control\.pause",
    "micro stats areal-node": "status",
    "req areal.gsm8k.status.controller.0": '"credits":',
    "req areal.gsm8k.status.node.0": '"num_groups_running":',
    "req areal.gsm8k.status.server.0-0": '"outstanding_tokens":',
    "req '$SRV.STATS'": '"areal-(?s:.*)"areal-(?s:.*)"areal-',
    "stream ls": "AREAL_gsm8k_OUTCOMES.*what became of every group",
    "stream info": 'Messages: +[0-9]|"messages": *[0-9]',
    "consumer info": 'Outstanding Acks: +[0-9]|"num_ack_pending": *[0-9]',
    "sub 'areal.gsm8k.events.>' ": "weights.announced",
    "sub 'areal.gsm8k.events.>' --all": "role.started",
    "kv ls": r"weights\.actor",
    "kv get": r'"version":"2-\d+"',
    "kv watch": r"server\.0-0.*\"version\":\"2-\d+\"",
    "sub areal.gsm8k.outcomes": '"group_id":"{group}","kind":"trained"',
    "sub 'areal.gsm8k.dead.>'": "nobody can read this",
    "control.pause": '"is_paused":true.*"reason":"lunch"',
    "control.resume": '"is_paused":false',
    "control.set": '"trainer.lr":1e-6',
    "control.eval": r'"version":"2-\d+","records":\[',
    "control.stop": '"is_stopping":true',
}
"""What is told, in either form, by the last of these that a line of the chapter begins with or has in it."""
A_GROUP = "0-17-0"
"""Any group, in the chapter."""


def test_a_version_is_an_arm_for_as_long_as_the_chapter_has_it(live: Run) -> None:
    directory = live.directory.parents[1]
    (block,) = _blocks(MONITOR_GUIDE, "console")
    adding, listing, removing = (shlex.split(command, comments=True)[1:] for command, _ in commands(block))
    wait_until(lambda: any(live.directory.glob("checkpoints/*-*")), "a checkpoint")

    assert "prompts more for each that is admitted" in _run(directory, *adding)
    wait_until(lambda: look(live).arms["before"]["num_pairs"] > 0, "a pair")
    assert re.search(r"before  \d-\d+: (not told apart|better|worse)", _run(directory, *listing))
    assert "is asked nothing more" in _run(directory, *removing)
    assert look(live).arms == {}
    assert not any(live.directory.glob("arms/*")), "its model goes with it"


def test_every_line_with_the_nats_tool_tells_what_the_chapter_says(live: Run, tmp_path: Path) -> None:
    directory = live.directory.parents[1]
    (lines,) = _blocks(BUS_GUIDE, "console")
    (alias, _), *shown = commands(lines)
    tool = _nats_tool(tmp_path)
    said = {line.partition("  #")[0].removeprefix("n ") + " ": line for line, _ in shown}
    expected = {line: [key for key in TOLD if key in line][-1:] for line in said}
    assert sorted(key for keys in expected.values() for key in keys) == sorted(TOLD), "a line says nothing, or is gone"
    wait_until(lambda: bool(_trained_groups(live)), "a checkpoint")
    group = _trained_groups(live)[0]
    asyncio.run(_publish(live, "areal.gsm8k.dead.undecodable", b"nobody can read this"))

    for line, (key,) in expected.items():
        if key == "control.stop":
            continue  # the next test needs the run, and does this last
        _assert_tells(directory, tool, alias, said[line].replace(A_GROUP, group), TOLD[key].replace("{group}", group))


def _nats_tool(folder: Path) -> str:
    """Return the folder with the tool."""
    if found := shutil.which("nats"):
        print(f"by {found}")
        return str(Path(found).parent)
    tool = folder / "nats"
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("nats_tool.py")}" "$@"\n')
    tool.chmod(0o755)
    return str(folder)


def _assert_tells(directory: Path, tool: str, alias: str, line: str, pattern: str) -> None:
    """Run a line as it stands until it has said what it is to say; what goes on by itself is then ended."""
    environment = {**os.environ, "PATH": f"{tool}{os.pathsep}{os.environ['PATH']}", "HOME": str(directory)}
    with subprocess.Popen(
        ["bash", "-c", f"shopt -s expand_aliases\n{alias}\n{line}"], cwd=directory, env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        killer = threading.Timer(TOLD_WITHIN_S, os.killpg, (process.pid, signal.SIGKILL))
        killer.start()
        told = ""
        for piece in process.stdout:
            told += piece
            if re.search(pattern, told):
                break
        killer.cancel()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert re.search(pattern, told), f"{line}\n{told}"


def _trained_groups(run: Run) -> list[str]:
    return [row["group_id"] for row in run.trained]


async def _publish(run: Run, subject: str, body: bytes) -> None:
    async with _operator(run) as client:
        await client.publish(subject, body)


@asynccontextmanager
async def _operator(run: Run) -> AsyncIterator["nats.NATS"]:
    client = await nats.connect(
        (run.directory / "bus" / "url").read_text().strip(),
        nkeys_seed=str(run.directory / "credentials" / "operator.nk"),
        inbox_prefix="_INBOX_services",
    )
    try:
        yield client
    finally:
        await client.close()


def test_every_command_and_the_plain_client_of_the_chapters_do_what_they_say(live: Run, tmp_path: Path) -> None:
    """A run is stopped once: here by the tool's line, by the verb of that name in ``test_mixed.py``."""
    directory = live.directory.parents[1]
    own, resizing, change = _blocks(GUIDE, "console")
    (lines,) = _blocks(BUS_GUIDE, "console")
    (alias, _), *_, (stopping, _) = commands(lines)
    (client,) = _blocks(BUS_GUIDE, "python")
    words = [shlex.split(command, comments=True)[1:] for command, _ in commands(own)]
    assert [one[2] for one in words] == list(ORDERS)
    ((changing, _),) = commands(change)

    (directory / "plain.py").write_text(client)
    told = _run(directory, "plain.py").splitlines()
    assert sorted(told[:4]) == ["areal-controller 0", "areal-node 0", "areal-server 0-0", "areal-trainer 0"]
    assert [line.split()[0] for line in told[4:6]] == ["tickets", "trajectories"]
    assert all(line.split()[1].isdecimal() for line in told[4:6])
    assert told[6:] == ["pause True", "resume False"]
    assert look(live).state == "running"
    _run(directory, *shlex.split(changing)[1:])
    assert look(live).changes == VALUES | {"trainer.lr": 1e-6, "rollout.max_staleness": 1}
    for command, _ in commands(resizing):
        _run(directory, *shlex.split(command, comments=True)[1:])
    for one in words[: ORDERS.index("stop")]:
        if one[2] == "top":
            terminal = Terminal(COLUMNS_80, *one[3:], directory=directory)
            terminal.wait(lambda text: "run gsm8k: running" in text, "the run in top")
            terminal.press("q")
            assert terminal.wait_ended(within_s=DEADLINE_S) == 0
            continue
        _run(directory, *one)
        if one[2] in ("pause", "resume"):
            assert look(live).state == ("paused" if one[2] == "pause" else "running")
    screen = Terminal(COLUMNS_100, "--run", str(live.directory))
    screen.wait(has("run gsm8k: running", "in flight"), "the run")
    _assert_tells(directory, _nats_tool(tmp_path), alias, stopping, TOLD["control.stop"])
    screen.wait(has("run gsm8k: ended", "status --run gsm8k tells how", "no alarm"), "the end")
    screen.press("q")
    assert screen.wait_ended(within_s=DEADLINE_S) == 0
    wait_until(lambda: look(live).state == "not running", "the run to end")


def test_a_run_that_was_steered_and_stopped_goes_on_from_there_as_it_was(live: Run) -> None:
    last = live.lines[-1]["step"]

    resumed = live.finish("--run.steps", str(last + 2), workflow=unhurried(live.directory.parent))

    assert resumed.returncode == 0, resumed.stdout
    assert_accounts(live, num_steps=last + 2, max_staleness=2)
    finished = _status(live)
    assert finished["state"] == "finished"
    assert finished["changes"] == VALUES | {"trainer.lr": 1e-6}
    temperatures = [line["temperature_mean"] for line in live.lines]
    assert (temperatures[0], temperatures[-1]) == (1.0, 0.8)
    assert all(line["logprob_gap_mean"] < 0.02 for line in live.lines)
    rates = [line["lr"] for line in live.lines]
    since, again = rates.index(1e-5), rates.index(1e-6)
    assert set(rates[since:again]) == {1e-5}, "a change outlives a crash"
    assert set(rates[again:]) == {1e-6}, "and the run's end"
    changed = [json.loads(line) for line in (live.directory / "changes.jsonl").read_text().splitlines()]
    told = [(one["setting"], one["after"], one["by"]) for one in changed]
    assert told[: len(VALUES)] == [(setting, after, "ann") for setting, after in VALUES.items()]
    orders = {(setting, after) for setting, after, by in told[len(VALUES) :] if by == "ann"}
    assert orders <= {("trainer.lr", 1e-6), ("rollout.max_staleness", 1)}
    assert {setting for setting, _, by in told[len(VALUES) :] if by != "ann"} <= {"run.steps"}, "what a start gave"
    _check_order_to_a_run_that_does_not_run(live)


def _check_order_to_a_run_that_does_not_run(run: Run) -> None:
    """It is one sentence."""
    done = said_by("pause", run.directory)

    assert (done.returncode, done.stderr) == (2, "run gsm8k: it does not run now; start it first\n")


def test_the_table_of_the_chapter_names_every_event_and_every_stream() -> None:
    text = chapter(BUS_GUIDE, "Subjects and streams")
    kinds = {
        kind.__struct_config__.tag
        for kind in [*vars(events).values(), wait_graph.Stall]
        if isinstance(kind, type) and issubclass(kind, events.Event) and "." in str(kind.__struct_config__.tag)
    }
    streams = {stream.rpartition("_")[2] for stream in all_streams(Names("x")) if not stream.startswith("KV")}

    assert [kind for kind in kinds if f"`{kind}`" not in text] == []
    assert [stream for stream in streams if f"_{stream}`" not in text] == []


def _run(directory: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=directory, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


def _status(run: Run) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(said_by("status", run.directory, "--json").stdout)
    return status
