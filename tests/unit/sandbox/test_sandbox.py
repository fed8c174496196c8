"""What a model writes runs, and that is all it does: nothing outside is touched, and nothing of it stays."""

import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from areal_async.errors import RewardError, UserError
from areal_async.sandbox import End, ProgramResult, Sandbox, SandboxLimits
from areal_async.sandbox.control_group import PREFIX, ControlGroup, make_control_group
from areal_async.sandbox.escape_suite import ESCAPES
from areal_async.sandbox.worker import NUM_BESIDES, SandboxWorker
from tests.brokers import until
from tools.sandbox_abuses import ABUSES

pytestmark = pytest.mark.anyio

SHORT = SandboxLimits(wall_s=0.7, cpu_s=1, memory_bytes=200 << 20)
"""For what is to be ended; a program that is to end by itself may take longer on a busy machine."""
PATIENT = SandboxLimits(wall_s=60.0, memory_bytes=200 << 20)
MADE_TO_END = {
    "sleep": End.OUT_OF_TIME,
    "ignore every signal": End.OUT_OF_TIME,
    "memory by many processes": End.OUT_OF_MEMORY,
    "memory in sockets of many processes": End.OUT_OF_MEMORY,
    "memory in connections that nobody takes": End.OUT_OF_MEMORY,
}
ORDINARY = {
    "files": """
import os, shutil, tempfile
with tempfile.TemporaryDirectory() as folder, open(f"{folder}/a", "w+") as file:
    file.write("x" * 100_000)
    file.flush()
    os.fsync(file.fileno())
    shutil.copy2(file.name, f"{folder}/b")
    shutil.copytree(folder, "/tmp/c")
    assert os.path.getsize("/tmp/c/b") == 100_000 and not os.isatty(0)
""",
    "a database": """
import sqlite3
with sqlite3.connect("file:/tmp/base?nolock=1", uri=True) as base:
    base.execute("create table t (n)")
    base.executemany("insert into t values (?)", [(n,) for n in range(100)])
assert sqlite3.connect("file:/tmp/base?nolock=1", uri=True).execute("select sum(n) from t").fetchone() == (4950,)
""",
    "threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    assert sum(pool.map(int, "1234")) == 10
""",
    "processes": """
import multiprocessing
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    with multiprocessing.Manager() as manager:
        assert manager.list([1])[0] == 1
""",
    "a server": """
import asyncio
async def answer(reader, writer):
    writer.write(await reader.readline())
    await writer.drain()
    writer.close()
async def main():
    async with await asyncio.start_unix_server(answer, "/tmp/server"):
        reader, writer = await asyncio.open_unix_connection("/tmp/server")
        writer.write(b"said\\n")
        assert await reader.readline() == b"said\\n"
        writer.close()
asyncio.run(main())
""",
    "a file sent": """
import socket
one, other = socket.socketpair()
open("/tmp/f", "wb").write(b"x" * 1000)
assert one.sendfile(open("/tmp/f", "rb")) == 1000 and other.recv(2000) == b"x" * 1000
""",
    "a child in its own session": """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, start_new_session=True)
os.killpg(child.pid, signal.SIGTERM)
assert child.wait() == -15
assert subprocess.run([sys.executable, "-c", "print(1)"], stdout=-1).stdout == b"1\\n"
""",
}
NO_GROUP = "nobody here may make a control group, and what the kernel holds is bounded by the filter alone"
PROVES_NOTHING_LEFT = "import os\nprint(os.listdir('/tmp') + os.listdir('/dev/shm'), os.getpid())"
OTHERS: set[int] = set()
"""Processes of a sandbox that other tests of this process share."""
CONNECT = """
import socket
try:
    socket.socket(socket.AF_UNIX).connect({!r})
except OSError:
    print("held")
"""


@pytest.fixture(scope="module")
def anyio_backend() -> object:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    OTHERS.update(sandboxed())
    async with Sandbox(limits=PATIENT) as running:
        yield running


def processes_below(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for child in map(int, children.read_text().split()):
                yield child
                yield from processes_below(child)


def sandboxed() -> list[int]:
    """Return the processes of the sandboxes that were started here."""
    return [pid for pid in processes_below(os.getpid()) if pid not in OTHERS and is_sandboxed(pid)]


def is_sandboxed(pid: int) -> bool:
    """Whether it runs in a sandbox; not, where it has just ended."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"bwrap" in line or b"/init.py" in line


async def idle(sandbox: Sandbox) -> int:
    """Return how many processes it has without a program."""
    await sandbox.run("print(1)")
    return len(sandboxed())


def user_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("Uid:")[1].split()[0])


def score_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def test_a_program_reads_its_input_and_its_outputs_come_back(sandbox: Sandbox) -> None:
    source = "import sys\nprint(sum(map(int, input().split())))\nprint('done', file=sys.stderr)"
    execution = await sandbox.run(source, stdin=b"1 2\n")
    assert (execution.end, execution.status) == (End.ENDED, 0)
    assert (execution.stdout, execution.stderr) == (b"3\n", b"done\n")
    assert not execution.is_cut


async def test_an_environment_with_a_copy_of_the_interpreter_runs_programs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copied = shutil.copy(sys.executable, tmp_path / "python")
    monkeypatch.setattr(sys, "executable", str(copied))
    async with Sandbox(limits=PATIENT) as sandbox:
        done = await sandbox.run("print(6 * 7)")
    assert done.stdout == b"42\n"


@pytest.mark.parametrize(
    ("source", "status"),
    [("raise SystemExit(3)", 3), ("raise SystemExit", 0), ("raise SystemExit('why')", 1), ("1 / 0", 1)],
)
async def test_it_ends_as_a_script_of_the_interpreter_does(sandbox: Sandbox, source: str, status: int) -> None:
    assert (await sandbox.run(source)).status == status


async def test_a_traceback_names_the_lines_of_the_program_alone(sandbox: Sandbox) -> None:
    execution = await sandbox.run("def f():\n    return 1 / 0\nf()\n")
    lines = execution.stderr.decode().splitlines()
    assert [line.strip() for line in lines if "File" in line] == [
        'File "program.py", line 3, in <module>',
        'File "program.py", line 2, in f',
    ]
    assert lines[-1] == "ZeroDivisionError: division by zero"


async def test_every_program_is_a_module_of_its_own_with_its_own_chance(sandbox: Sandbox) -> None:
    source = (
        "import random, __main__\n__main__.seen = 1\nprint(hasattr(__main__, 'before'), random.random())\nbefore = 1"
    )
    outputs = [(await sandbox.run(source)).stdout for _ in range(3)]
    assert all(output.startswith(b"False") for output in outputs)
    assert len(set(outputs)) == 3


async def test_what_waits_for_several_things_at_once_still_can(sandbox: Sandbox) -> None:
    """An event loop needs a pair of sockets and a watch on them; a process of its own, pipes."""
    source = """
import asyncio, sys
async def main():
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(2)", stdout=-1)
    print(await asyncio.to_thread(int, 1), (await child.communicate())[0])
asyncio.run(main())
"""
    execution = await sandbox.run(source)
    assert execution.stdout == b"1 b'2\\n'\n", execution


@pytest.mark.parametrize("name", ORDINARY)
async def test_an_ordinary_program_works(sandbox: Sandbox, name: str) -> None:
    execution = await sandbox.run(ORDINARY[name])
    assert (execution.end, execution.status) == (End.ENDED, 0), execution


@pytest.mark.parametrize("name", ESCAPES)
async def test_no_program_escapes(sandbox: Sandbox, name: str) -> None:
    execution = await sandbox.run(ESCAPES[name])
    assert execution.stdout == b"held\n", execution


@pytest.mark.parametrize("name", ABUSES)
async def test_an_abuse_ends_in_time_and_leaves_nothing_behind(sandbox: Sandbox, name: str) -> None:
    before = set(sandboxed())
    limits = PATIENT if MADE_TO_END.get(name) is End.OUT_OF_MEMORY else SHORT
    execution = await sandbox.run(ABUSES[name], limits=limits)
    after = await sandbox.run(PROVES_NOTHING_LEFT)

    assert after.stdout == b"[] 2\n"
    assert set(sandboxed()) == before, "the same sandbox is alive, and no process beside it"
    assert execution.end is MADE_TO_END.get(name, execution.end)
    assert len(execution.stdout) <= SHORT.output_bytes
    assert len(execution.stderr) <= SHORT.output_bytes


async def test_the_corpus_is_as_large_as_promised() -> None:
    assert len(ESCAPES) + len(ABUSES) >= 40


async def test_an_output_is_cut_and_says_so(sandbox: Sandbox) -> None:
    limits = SandboxLimits(output_bytes=10)
    whole, cut = [await sandbox.run(f"print('x' * {length}, end='')", limits=limits) for length in (10, 11)]
    assert (whole.stdout, whole.is_cut) == (b"x" * 10, False)
    assert (cut.stdout, cut.is_cut) == (b"x" * 10, True)


async def test_a_program_has_no_more_processes_than_its_limit(sandbox: Sandbox) -> None:
    source = """
import os, signal
count = 0
try:
    while True:
        if not os.fork():
            signal.pause()
        count += 1
except BlockingIOError:
    print(count)
"""
    execution = await sandbox.run(source, limits=SandboxLimits(num_processes=5))
    assert 1 <= int(execution.stdout) <= 5 + NUM_BESIDES


async def test_a_program_does_not_reach_what_listens_in_the_network_outside(sandbox: Sandbox) -> None:
    """Abstract UNIX sockets belong to a network namespace, and are the one kind of socket the filter lets through."""
    name = f"\0sandbox-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(name)
        listening.listen()
        execution = await sandbox.run(CONNECT.format(name))
    assert execution.stdout == b"held\n"


async def test_a_program_reads_no_roles_credentials(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "credentials" / "trainer.nk"
    secret.parent.mkdir()
    secret.write_text("SUANOTAKEY")
    for path in (*tmp_path.parents, tmp_path, secret.parent, secret):
        if path.stat().st_uid == os.geteuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)  # the walls hold it back, not its mode

    source = f"""
import os
found = []
for path in {[str(secret), f"/proc/1/root{secret}", f"/python/../..{secret}"]!r}:
    try:
        found.append(open(path).read())
    except OSError:
        pass
for folder, below, names in os.walk("/"):
    below[:] = set(below) - {{"usr", "python"}}  # the interpreter's and the system's, and large
    found += [f"{{folder}}/{{name}}" for name in names if name.endswith(".nk")]
print(found or "held")
"""
    execution = await sandbox.run(source)
    assert execution.stdout == b"held\n", execution


async def test_empty_files_are_counted_as_the_kernels_memory_is_not(sandbox: Sandbox) -> None:
    execution = await sandbox.run(ABUSES["files without content"], limits=SandboxLimits(num_files=100))
    assert execution.stdout in (b"left 98\n", b"left 99\n"), "the folder itself is one"


async def test_a_program_goes_before_its_host_where_memory_is_short(sandbox: Sandbox) -> None:
    await sandbox.run("print(1)")
    assert {score_of(pid) for pid in sandboxed()} == {1000}


async def test_no_program_has_memory_that_is_in_no_process(sandbox: Sandbox) -> None:
    """Every way to hold memory that a look at the processes does not see is refused, or small."""
    before = shared_bytes()
    for name in ("memory in files", "memory in pipes", "memory in sockets", "files without content"):
        await sandbox.run(ABUSES[name], limits=SHORT)
    # And nothing of it stays. The kernel counts what all of the machine has: others come and go.
    await until(lambda: shared_bytes() - before < 32 << 20)


@pytest.mark.parametrize("name", ["memory in sockets of many processes", "memory in connections that nobody takes"])
async def test_sockets_are_counted_without_a_control_group(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("areal_async.sandbox.worker.make_control_group", lambda: None)
    async with Sandbox(limits=PATIENT) as sandbox:
        execution = await sandbox.run(ABUSES[name])
    assert execution.end is End.OUT_OF_MEMORY


async def test_what_the_kernel_holds_for_a_program_counts(sandbox: Sandbox) -> None:
    """Each process of the program has tens of thousands of maps, and next to no page that is its own."""
    if (group := make_control_group()) is None:
        pytest.skip(NO_GROUP)
    await group.remove()
    execution = await sandbox.run(ABUSES["memory in maps of memory"], limits=PATIENT)
    assert execution.end is End.OUT_OF_MEMORY


async def test_memory_is_counted_where_a_control_group_may_be_made_and_not_joined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if (group := make_control_group()) is None:
        pytest.skip(NO_GROUP)
    monkeypatch.setattr("areal_async.sandbox.worker.make_control_group", lambda: group)
    monkeypatch.setattr(ControlGroup, "door", str(tmp_path / "nowhere" / "cgroup.procs"))
    async with Sandbox(limits=PATIENT) as sandbox:
        execution = await sandbox.run(ABUSES["memory by many processes"])
    assert execution.end is End.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "files",
    [
        {"memory.current": "700", "memory.swap.current": "40", "memory.stat": "anon 500\nfile 200\n"},
        {"memory.current": "740", "memory.stat": "anon 500\nfile 200\n"},
        {"memory.usage_in_bytes": "700", "memory.stat": "cache 200\nrss 500\nswap 40\n"},
        {"memory.usage_in_bytes": "740", "memory.stat": "cache 200\nrss 540\n"},
    ],
    ids=["two", "two without swap", "one", "one without swap"],
)
def test_a_control_group_counts_what_is_swapped_out_and_not_files(tmp_path: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert ControlGroup(tmp_path).held_bytes() == 540


async def test_a_sandbox_leaves_no_control_group_and_removes_what_a_dead_one_left() -> None:
    if (mine := make_control_group()) is None:
        pytest.skip(NO_GROUP)
    folder = Path(mine.door).parent
    await mine.remove()
    before = set(folder.parent.glob(f"{PREFIX}{os.getpid()}-*"))
    left_by_the_dead = folder.with_name(f"{PREFIX}{1 << 23}-0")  # beyond any process's number
    left_by_the_dead.mkdir()
    async with Sandbox(limits=PATIENT):
        assert not left_by_the_dead.exists()
        assert len(set(folder.parent.glob(f"{PREFIX}{os.getpid()}-*")) - before) == 1
    assert set(folder.parent.glob(f"{PREFIX}{os.getpid()}-*")) == before


def shared_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Shmem:"))


async def test_input_cannot_be_changed_for_whoever_reads_it_next(sandbox: Sandbox) -> None:
    execution = await sandbox.run(
        "import os\ntry:\n    os.write(0, b'x')\nexcept OSError:\n    print('held')", stdin=b"1"
    )
    assert execution.stdout == b"held\n"


async def test_whoever_no_longer_waits_leaves_no_program_running(sandbox: Sandbox) -> None:
    num_idle = await idle(sandbox)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sandbox.run, "import time\ntime.sleep(60)")
        await until(lambda: len(sandboxed()) > num_idle)
        running = sandboxed()
        tasks.cancel_scope.cancel()
    await until(lambda: not any(map(is_sandboxed, running)))
    assert (await sandbox.run("print(1)")).stdout == b"1\n"


async def test_whoever_does_not_wait_for_a_sandbox_to_start_leaves_none_that_gives_others_answers() -> None:
    worker = SandboxWorker()
    sandbox = Sandbox(limits=PATIENT)
    sandbox._free = sandbox._all = [worker]
    async with anyio.create_task_group() as starting:
        starting.start_soon(sandbox.run, "print(1)")
        await until(lambda: worker._process is not None)
        starting.cancel_scope.cancel()

    try:
        for number in range(3):
            execution = await sandbox.run(f"import sys; print({number}); sys.exit({number})")
            assert (execution.status, execution.stdout) == (number, f"{number}\n".encode())
    finally:
        await sandbox.__aexit__()


async def test_a_sandbox_that_is_killed_is_replaced_and_the_program_runs_again(sandbox: Sandbox) -> None:
    num_idle = await idle(sandbox)
    executions: list[ProgramResult] = []
    killed: list[int] = []

    async def kill() -> None:
        await until(lambda: len(sandboxed()) > num_idle)
        killed.append(sandboxed()[0])
        os.kill(killed[0], signal.SIGKILL)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill)
        while not killed:  # where this process comes late, the program has ended before it was seen
            executions.append(await sandbox.run("import time\ntime.sleep(0.5)\nprint(1)"))
    assert {execution.stdout for execution in executions} == {b"1\n"}


async def test_a_program_under_which_every_sandbox_ends_fails_alone(sandbox: Sandbox) -> None:
    num_idle = await idle(sandbox)

    async def kill_again_and_again() -> None:
        while True:
            await anyio.sleep(0.02)
            running = sandboxed()
            if len(running) > num_idle:
                os.kill(running[0], signal.SIGKILL)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill_again_and_again)
        with pytest.raises(RewardError, match="got 3 sandboxes that ended under one program"):
            await sandbox.run("import time\ntime.sleep(30)")
        tasks.cancel_scope.cancel()
    assert (await sandbox.run("print(1)")).stdout == b"1\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has something to give away")
async def test_nothing_in_it_is_root(sandbox: Sandbox) -> None:
    await sandbox.run("print(1)")
    assert {user_of(pid) for pid in sandboxed()} == {65534}


async def test_programs_run_beside_each_other_up_to_the_size() -> None:
    async with Sandbox(size=2, limits=PATIENT) as sandbox, anyio.create_task_group() as tasks:
        tasks.start_soon(sandbox.run, "import time\ntime.sleep(60)")
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(PATIENT.wall_s / 2):
            assert (await sandbox.run("print(1)")).stdout == b"1\n"
        tasks.cancel_scope.cancel()


async def test_a_wall_that_a_busy_machine_lets_speak_late_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.sandbox.programs.ESCAPES", {"late": "import time; time.sleep(6); print('held')"})

    async with Sandbox() as sandbox:
        assert (await sandbox.run("print(1)")).stdout == b"1\n"


async def test_where_a_wall_does_not_hold_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ESCAPES, "a gap", "print('through')")
    with pytest.raises(UserError, match="the wall against 'a gap' does not hold on this machine"):
        async with Sandbox():
            pass


@pytest.fixture
def bubblewrap_that_may_not(tmp_path: Path) -> Path:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'no permissions to create a new namespace' >&2\nexit 1\n")
    for path in (tmp_path, broken):
        path.chmod(0o755)
    return broken


async def test_where_namespaces_are_forbidden_the_cause_is_told(
    bubblewrap_that_may_not: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.sandbox.worker.find_bubblewrap", lambda: bubblewrap_that_may_not)
    with pytest.raises(UserError, match=r"isolated on this machine: .*no permissions to create a new namespace"):
        async with Sandbox():
            pass


async def test_a_machine_without_a_filter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.sandbox.worker.ARCHITECTURES", {})
    with pytest.raises(UserError, match="need Linux on one of"):
        async with Sandbox():
            pass


@pytest.mark.parametrize("name", ["wall_s", "cpu_s", "memory_bytes", "num_processes", "output_bytes"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: got 0, need more than 0"):
        SandboxLimits(**{name: 0})
