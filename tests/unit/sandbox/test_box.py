"""A box lasts: its shell and files stay from command to command, whatever they do; nothing of it outlives it."""

import errno
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog.testing

from areal_async.errors import RolloutError, UserError
from areal_async.sandbox import Box, BoxLimits, End, sandbox
from areal_async.sandbox.box_escapes import ATTEMPTS, BOX_ESCAPES, RUNNER, attempts
from areal_async.sandbox.control_group import PREFIX, make_control_group
from areal_async.sandbox.keeper import KEEPERS, BoxKeeper, BoxKeepers
from areal_async.sandbox.shell import Ending, Shell
from tests.brokers import until
from tests.unit.sandbox.test_sandbox import is_sandboxed, processes_below
from tools.box_abuses import BOX_ABUSES

pytestmark = pytest.mark.anyio

SMALL = BoxLimits(
    memory_bytes=200 << 20, disk_bytes=24 << 20, num_files=5000, shm_bytes=4 << 20, num_processes=40, cpu_s=30
)
SHORT_S = 0.4
"""For what is to be ended; whatever ends by itself has the limits' time."""
NEW_SHELL = {"end the shell", "leave", "become a shell that hears nothing", "errors end it"}
"""Abuses after which there is another shell in any case."""
NOTHING_LEFT = "/dev/shm:\n\n/tmp:\n\n/workspace:\nbash: kill: (-1) - No such process"
TREE = r"""
mkdir -p a/b closed && echo one > a/one && ln a/one a/b/two && ln -s ../one a/b/link && ln -s /etc/shadow a/out
mkfifo pipe && truncate -s 8M holes && printf end >> holes && printf '\0\377' > 'odd
name' && chmod 751 a && touch -d 2001-02-03 a/one && echo x > closed/x && chmod 000 closed
mknod white c 0 0 2>/dev/null; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("listens")'
"""
LOOK = r"""
chmod 755 closed; cat closed/x; ls -a; stat -c '%n %F %h %a %s %Y' a a/one a/b/* pipe odd* holes | sort
readlink a/out a/b/link; [ a/one -ef a/b/two ] && du -k holes | cut -f 1; chmod 000 closed
"""


@pytest.fixture(scope="module")
def anyio_backend() -> object:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def warm() -> AsyncIterator[None]:
    """Have the walls tried and a keeper wait, for all tests."""
    async with sandbox():
        pass
    yield
    await KEEPERS.aclose()


@pytest.fixture
async def box(warm: None) -> AsyncIterator[Box]:
    async with sandbox(SMALL) as one:
        yield one


@pytest.fixture(params=["overlay", "copy"])
async def either(request: pytest.FixtureRequest, box: Box, monkeypatch: pytest.MonkeyPatch) -> Box:
    if request.param == "overlay" and not box.can_overlay:
        pytest.skip("the kernel does not let an ordinary user lay file systems over each other")
    monkeypatch.setattr(box._keeper, "can_overlay", request.param == "overlay")
    return box


async def said(box: Box, command: str) -> str:
    done = await box.run(command)
    assert done.end is End.ENDED
    return done.text.strip()


async def error_of(action: Awaitable[object]) -> int | None:
    """Return the number of the error that the kernel, or the box for it, answers with."""
    try:
        await action
    except OSError as exc:
        return exc.errno
    return None


async def is_whole(box: Box) -> bool:
    return await said(box, "cd /workspace; echo $((6 * 7)) $PWD") == "42 /workspace"


async def test_folder_variables_functions_and_what_runs_beside_stay_from_command_to_command(box: Box) -> None:
    done = await box.run("cd /tmp; export A=1; b=2; c() { echo c; }; sleep 100 & d=$!; false")

    assert (done.end, done.status, done.is_new_shell) == (End.ENDED, 1, False)
    assert await said(box, "echo $PWD $A $b $(c); kill -0 $d && echo runs") == "/tmp 1 2 c\nruns"


async def test_both_outputs_come_back_in_their_order(box: Box) -> None:
    assert await said(box, "echo 1; echo 2 >&2; echo 3; cat; read x; echo $?") == "1\n2\n3\n1"


@pytest.mark.parametrize("name", BOX_ESCAPES)
async def test_no_command_escapes(box: Box, name: str) -> None:
    done = await box.run(BOX_ESCAPES[name])
    assert done.text.endswith("held\n"), done
    assert not done.is_new_shell


async def test_no_program_of_the_suite_escapes_from_a_box(box: Box) -> None:
    await box.write(ATTEMPTS, attempts())
    assert await said(box, f"python3 -I -S - <<'E'{RUNNER}\nE") == "held"


@pytest.mark.parametrize("name", BOX_ABUSES)
async def test_a_box_goes_on_after_an_abuse_and_a_reset_leaves_nothing_of_it(
    box: Box, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.sandbox.box.INTERRUPT_GRACE_S", 0.1)
    await box.write("kept", "kept")
    done = await box.run(BOX_ABUSES[name], timeout_s=SHORT_S)
    again = await box.run("cd /workspace; cat kept; echo $((6 * 7))", timeout_s=SHORT_S)
    if not again.output.endswith(b"kept42\n"):  # the shell has been made one that says nothing; and so it is ended
        await box.restart()
        again = await box.run("cat kept; echo $((6 * 7))")

    assert again.output.endswith(b"kept42\n"), (done, again)
    assert len(done.output) <= SMALL.output_bytes + 100
    if name in NEW_SHELL:
        assert done.is_new_shell
    await box.reset()
    assert await said(box, "ls -A /workspace /tmp /dev/shm; kill -0 -1 2>&1") == NOTHING_LEFT


async def test_what_takes_too_much_memory_is_ended_with_all_that_runs(box: Box) -> None:
    done = await box.run(BOX_ABUSES["memory of many processes"])

    assert (done.end, done.status, done.is_new_shell) == (End.OUT_OF_MEMORY, None, True)
    assert await is_whole(box)


async def test_a_command_without_end_is_interrupted_and_the_shell_goes_on(box: Box) -> None:
    await box.run("cd /tmp; a=1")
    done = await box.run("echo so far; sleep 60; echo never", timeout_s=SHORT_S)

    assert (done.end, done.status, done.is_new_shell) == (End.OUT_OF_TIME, None, False)
    assert "so far" in done.text
    assert "never" not in done.text
    assert await said(box, "echo $PWD $a") == "/tmp 1"


async def test_a_command_that_heeds_no_interrupt_ends_with_its_shell_and_says_so(box: Box) -> None:
    await box.run("cd /tmp; a=1; sleep 100 & echo $! > /workspace/beside")
    done = await box.run("trap '' INT; sleep 60", timeout_s=SHORT_S)

    assert (done.end, done.is_new_shell) == (End.OUT_OF_TIME, True)
    again = await box.run("echo $PWD $a; kill -0 $(cat /workspace/beside) || echo gone")
    assert not again.is_new_shell
    assert again.output.startswith(b"/tmp\n")
    assert again.output.endswith(b"gone\n")


async def test_whoever_no_longer_waits_leaves_a_box_that_goes_on(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.sandbox.box.INTERRUPT_GRACE_S", 60.0)  # however busy the machine is
    await box.run("a=1")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(box.run, "echo of the one before; sleep 60; touch /tmp/never")
        await until(lambda: box._shell is not None and not box._shell.is_idle)
        tasks.cancel_scope.cancel()

    assert await said(box, "echo $a; ls /tmp") == "1"


async def test_an_interrupt_that_comes_before_the_command_begins_is_made_again(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.sandbox.box.INTERRUPT_GRACE_S", 60.0)
    tell, num_asked = Box._tell, itertools.count()

    async def tell_late(box: Box, request: dict[str, Any], *files: Any) -> None:
        if request["do"] != "interrupt" or next(num_asked):
            await tell(box, request, *files)

    monkeypatch.setattr(Box, "_tell", tell_late)
    await box.run("a=1")
    done = await box.run("sleep 60; touch /tmp/never", timeout_s=SHORT_S)

    assert done.end is End.OUT_OF_TIME
    assert await said(box, "echo $a; ls /tmp") == "1"
    assert next(num_asked) == 2


async def test_a_long_command_that_is_cut_off_on_its_way_in_leaves_nothing_to_the_next(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Shell.ended

    async def leave_some(shell: Shell) -> Ending:
        ending = await ended(shell)
        os.write(shell._input, b"touch never; ")
        return ending

    with monkeypatch.context() as patch:
        patch.setattr(Shell, "_wait_writable", lambda _: anyio.sleep_forever())  # the shell waits for the rest
        patch.setattr(Shell, "ended", leave_some)  # as where it is interrupted before it reads
        done = await box.run("touch never # " + "x" * 500_000, timeout_s=SHORT_S)

    assert done.end is End.OUT_OF_TIME
    assert await said(box, "ls; echo " + "y" * 200_000 + " | wc -c") == "200001"


async def test_a_program_whose_reader_has_gone_ends_as_in_any_shell(box: Box) -> None:
    assert await said(box, "yes | head -1; echo ${PIPESTATUS[0]}") == f"y\n{128 + signal.SIGPIPE}"


async def test_a_flood_keeps_its_beginning_and_its_end_and_says_how_much_is_left_out(box: Box) -> None:
    done = await box.run("echo first; head -c 1000000 /dev/urandom | tr -c x x; echo last")

    assert done.text.startswith("first\nx")
    assert done.text.endswith("xlast\n")
    assert done.num_left_out == 1_000_000 + len("first\nlast\n") - SMALL.output_bytes
    assert f"\n({done.num_left_out} bytes left out)\n" in done.text


async def test_what_the_background_prints_comes_before_the_next_output(box: Box) -> None:
    await box.run("(sleep 0.05; echo beside; touch /tmp/said) &")
    await until_there(box, "/tmp/said")
    assert await said(box, "echo mine") == "beside\nmine"


async def until_there(box: Box, path: str) -> None:
    while True:
        try:
            await box.read(path)
        except FileNotFoundError:
            await anyio.sleep(0.02)
        else:
            return


async def test_an_end_that_a_command_makes_up_is_not_taken_for_one(box: Box) -> None:
    """Also one that waits in the background for the next command."""
    forge = "for n in {10..30}; do { printf '%016x 0 /forged\\0' 0 >&$n; } 2>/dev/null; done"
    await box.run(f"(while sleep 0.01; do {forge}; done) &")

    done = await box.run(f"{forge}; sleep 0.1; echo true end; (exit 5)")
    assert done.status == 5
    assert "true end\n" in done.text
    assert await said(box, "echo $PWD") != "/forged"


async def test_a_file_is_written_and_read_byte_for_byte(box: Box) -> None:
    content = bytes(range(256)) * 5000
    await box.write("new/folder/odd\nname", content, mode=0o755)

    assert await box.read("/workspace/new/folder/odd\nname") == content
    assert await said(box, "stat -c %a new/folder/*") == "755"
    await box.write("new/folder/odd\nname", "shorter")
    assert await box.read("new/folder/odd\nname") == b"shorter"


@pytest.mark.parametrize(
    ("prepare", "path", "error"),
    [
        ("", "absent", errno.ENOENT),
        ("", "/workspace", errno.EISDIR),
        ("", "/etc/shadow", errno.ENOENT),
        ("", "../../../../../etc/shadow", errno.ENOENT),
        ("ln -s /etc/shadow it", "it", errno.ENOENT),
        ("ln -s ../../../../root/.bashrc it", "it", errno.ENOENT),
        ("ln -s it it", "it", errno.ELOOP),
        ("ln -s /proc/1/environ it", "it", errno.ENOENT),
        ("mkfifo it", "it", errno.EINVAL),
        ("", "/dev/zero", errno.EINVAL),
        ("ln -s /dev/urandom it", "it", errno.EINVAL),
        ("", "/dev/tty", errno.ENXIO),
        ("truncate -s 20M it", "it", errno.EFBIG),
        ("python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"it\")'", "it", errno.ENXIO),
        ("echo x > it; chmod 000 it", "it", errno.EACCES),
        ("mkdir it; chmod 000 it", "it/below", errno.EACCES),
    ],
)
async def test_what_is_read_is_a_file_of_the_box_and_has_an_end(box: Box, prepare: str, path: str, error: int) -> None:
    await said(box, prepare or "true")
    assert await error_of(box.read(path)) == error


@pytest.mark.parametrize(
    ("prepare", "path", "error"),
    [
        ("", "/usr/bin/mine", errno.EROFS),
        ("", "/etc/ld.so.preload", errno.EROFS),
        ("", "/python/lib/mine.py", errno.EROFS),
        ("", "/dev/mine", errno.EROFS),
        ("ln -s /usr/bin/bash it", "it", errno.EACCES),
        ("ln -s /etc it", "it/mine", errno.EROFS),
        ("mkfifo it", "it", errno.ENXIO),
        ("mkfifo it; cat it & sleep 0.05", "it", errno.EINVAL),
        ("ln -s /dev/null it", "it", errno.EINVAL),
        ("", "/workspace", errno.EISDIR),
        ("echo x > it", "it/below", errno.EEXIST),
        ("echo x > it; chmod 400 it", "it", errno.EACCES),
        ("", "x" * 300, errno.ENAMETOOLONG),
    ],
)
async def test_what_is_written_is_a_file_of_the_box(box: Box, prepare: str, path: str, error: int) -> None:
    await said(box, prepare or "true")
    assert await error_of(box.write(path, b"mine")) == error


async def test_what_has_no_room_is_told(box: Box) -> None:
    assert await error_of(box.write("large", bytes(SMALL.disk_bytes + 1))) in (errno.ENOSPC, errno.EFBIG)
    assert await is_whole(box)


async def test_a_path_that_becomes_a_link_meanwhile_leads_nowhere_else(box: Box, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    await box.write("inside", "inside")
    swap = f"while :; do ln -sfn {secret} it; ln -sfn inside it; rm -rf d; mkdir d; rm -rf d; ln -s {tmp_path} d; done"
    await box.run(f"({swap}) >/dev/null 2>&1 &")
    seen, errors = set[bytes](), set[int | None]()
    for _ in range(40):
        errors.add(await error_of(box.write("it", "written")))
        errors.add(await error_of(box.write("d/planted", "written")))
        with suppress(OSError):
            seen.add(await box.read("it"))
    assert seen <= {b"inside", b"written", b""}
    assert errors <= {None, errno.ENOENT, errno.ENOTDIR, errno.EEXIST}
    assert secret.read_text() == "secret"
    assert os.listdir(tmp_path) == ["secret"]


async def test_files_come_and_go_while_everything_in_the_box_is_ended_again_and_again(box: Box) -> None:
    await box.run("(trap '' TERM; while :; do kill -9 -1; done) >/dev/null 2>&1 &", timeout_s=SHORT_S)
    errors = {await error_of(box.write("it", str(number))) for number in range(10)}
    assert errors <= {None, errno.EINTR}
    await box.restart()
    assert await is_whole(box)


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000, "a\ud800"])
async def test_a_path_that_can_be_none_is_refused(box: Box, path: str) -> None:
    with pytest.raises(ValueError, match="^path: got"):
        await box.read(path)


@pytest.mark.parametrize("command", ["echo a\0b", "x" * ((1 << 20) + 1)])
async def test_a_command_that_can_be_none_is_refused(box: Box, command: str) -> None:
    with pytest.raises(ValueError, match="command: got"):
        await box.run(command)


async def test_a_reset_puts_back_what_the_snapshot_held(either: Box) -> None:
    await said(either, TREE)
    before = await said(either, LOOK)
    await either.snapshot()
    await said(either, "chmod 755 closed; rm -rf a holes closed; mkdir a; echo new > a/one; echo x > pipe & touch more")
    await either.reset()

    assert await said(either, "ls -A white listens more 2>/dev/null") == "", "no devices, no sockets, and nothing new"
    assert await said(either, LOOK) == "\n".join(
        line for line in before.splitlines() if line not in ("white", "listens")
    )
    await said(either, "rm -rf a; mkdir a; ls -A a")
    await either.reset()
    assert await said(either, "cat a/one") == "one"


async def test_whoever_no_longer_waits_for_a_reset_has_a_box_that_was_reset(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = BoxKeeper.ask
    await box.run("touch made")
    async with anyio.create_task_group() as tasks:

        async def ask_nobody(keeper: BoxKeeper, *asked: Any) -> None:
            tasks.cancel_scope.cancel()
            await ask(keeper, *asked)

        with monkeypatch.context() as patch:
            patch.setattr(BoxKeeper, "ask", ask_nobody)
            await box.reset()

    assert tasks.cancel_scope.cancel_called
    assert await said(box, "ls; echo on") == "on"


async def test_the_newest_snapshot_counts_and_without_one_the_beginning(either: Box) -> None:
    await said(either, "touch first; a=1; cd /tmp")
    await either.reset()
    assert await said(either, "ls; echo $a $PWD") == "/workspace"
    for name in ("one", "two", "three"):
        await said(either, f"touch {name}; rm -f one; a={name}")
        await either.snapshot()
        assert await said(either, "echo $a") == name, "the shell goes on"
    await said(either, "rm *")
    await either.reset()
    assert await said(either, "ls") == "three\ntwo"


async def test_a_snapshot_without_room_is_told_and_the_one_before_counts(box: Box) -> None:
    await said(box, "head -c 20000000 /dev/urandom > a")
    await box.snapshot()
    await said(box, "rm a; head -c 20000000 /dev/urandom > b")
    await box.snapshot()
    assert await error_of(box.snapshot()) == errno.ENOSPC
    await box.reset()
    assert await said(box, "ls") == "b"


async def test_a_snapshot_of_folders_that_lie_too_deep_is_told(box: Box) -> None:
    await said(box, BOX_ABUSES["folders in folders"])
    with pytest.raises(OSError, match="deeper than 200"):
        await box.snapshot()
    assert await is_whole(box)


async def test_a_new_shell_has_nothing_of_what_the_last_was_made_to_do(box: Box) -> None:
    await box.run("echo() { builtin echo forged; }; alias cat='true'; PATH=/workspace; echo x > .bashrc; cd /tmp")
    await box.write(".bash_profile", "exit 9")
    await box.write(".bashrc", "exit 9")
    await box.restart()

    done = await box.run("echo true; cat .bashrc; ls -A; echo $PWD")
    assert done.text == "true\nexit 9.bash_profile\n.bashrc\n/workspace\n"
    assert not done.is_new_shell, "it was asked for"


@pytest.mark.parametrize("num_snapshots", [0, 1])
async def test_there_is_more_room_for_who_comes_after_one_that_took_it_all(either: Box, num_snapshots: int) -> None:
    for _ in range(num_snapshots):
        await either.snapshot()
        await either.reset()
    await either.run(f"yes | head -c {2 * SMALL.disk_bytes} > large")
    await either.run('python3 -c \'for n in range(10**5): open(f"/tmp/{n}", "w")\'')
    assert await error_of(either.write("more", b"x")) == errno.ENOSPC
    await either.restart()
    assert await error_of(either.write("more", b"x")) == errno.ENOSPC

    await either.restart(has_more_room=True)
    await either.write("more", bytes(SMALL.disk_bytes - (1 << 20)))
    assert await error_of(either.write("over", bytes(2 << 20))) == errno.ENOSPC
    assert await said(either, "stat -c %s more") == str(SMALL.disk_bytes - (1 << 20))


async def test_nothing_is_left_for_the_next_box_of_the_same_keeper(warm: None) -> None:
    keepers = BoxKeepers()
    keepers.is_tried = True
    leave = (
        "touch /x /tmp/x /dev/shm/x /run/x /var/tmp/x; trap '' TERM HUP; setsid sleep 100 & disown; "
        'python3 -c \'import socket, time; s = socket.socket(socket.AF_UNIX); s.bind("\\0left"); s.listen(); '
        'open("/tmp/ready", "w"); time.sleep(100)\' &'
    )
    async with sandbox(SMALL, keepers=keepers) as box:
        await box.run(leave)
        await until_there(box, "/tmp/ready")
        await box.snapshot()
        first = box._keeper
    async with sandbox(SMALL, keepers=keepers) as box:
        assert box._keeper is first
        connect = "python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"\\0left\")' 2>&1 | tail -1"
        seen = await said(box, f"ls -A /x /tmp /dev/shm /run /var/tmp /workspace 2>/dev/null; {connect}")
        assert "x\n" not in seen
        assert seen.endswith("ConnectionRefusedError: [Errno 111] Connection refused")
        with pytest.raises(FileNotFoundError):
            await box.read("/tmp/ready")
    await keepers.aclose()


async def test_keepers_that_end_leave_no_control_group(warm: None) -> None:
    if (one := make_control_group()) is None:
        pytest.skip("no control group may be made here")
    place = Path(one.door).parent.parent
    await one.remove()

    def mine() -> set[Path]:
        return set(place.glob(f"{PREFIX}{os.getpid()}-*"))

    before, keepers = mine(), BoxKeepers()
    keepers.is_tried = True
    async with sandbox(SMALL, keepers=keepers), sandbox(SMALL, keepers=keepers):
        assert len(mine() - before) == 2
    assert len(mine() - before) == 2, "they wait for the next boxes"

    await keepers.aclose()
    assert mine() == before


async def test_boxes_beside_each_other_see_nothing_of_each_other(warm: None) -> None:
    async with sandbox(SMALL) as one, sandbox(SMALL) as other:
        await one.run("touch /tmp/mine; sleep 100 & echo $! > /tmp/number")
        number = int(await one.read("/tmp/number"))
        assert await said(other, f"ls /tmp; kill -9 {number} 2>/dev/null; kill -9 -1 2>/dev/null") == ""
        assert await said(one, f"ls /tmp; kill -0 {number} && echo runs") == "mine\nnumber\nruns"


OWNER = """
import anyio, sys
from areal_async.sandbox import sandbox
from areal_async.sandbox.control_group import PREFIX, make_control_group
from areal_async.sandbox.keeper import KEEPERS
async def main():
    KEEPERS.is_tried = True
    async with sandbox() as box:
        await box.run("setsid sleep 1000 & disown; trap '' HUP TERM")
        print("ready", flush=True)
        await box.run("sleep 1000")
anyio.run(main)
"""


async def test_a_box_ends_with_its_process_however_that_ends(warm: None) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:  # noqa: ASYNC220
        assert owner.stdout is not None
        assert await anyio.to_thread.run_sync(owner.stdout.readline) == b"ready\n"

        def running() -> list[int]:
            return [pid for pid in processes_below(owner.pid) if is_sandboxed(pid) or is_named(pid, b"sleep")]

        await until(lambda: len(running()) > 2)  # both sleep
        there = running()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    await until(lambda: not any(is_sandboxed(pid) or is_named(pid, b"sleep") for pid in there))


def is_named(pid: int, name: bytes) -> bool:
    try:
        return name in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def test_who_wants_more_boxes_than_may_be_waits_and_the_log_says_so(
    warm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.sandbox.keeper.TOLD_AFTER_S", 0.05)
    keepers = BoxKeepers(max_boxes=1)
    keepers.is_tried = True
    opened = anyio.Event()

    async def open_another() -> None:
        async with sandbox(SMALL, keepers=keepers):
            opened.set()

    with structlog.testing.capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            async with sandbox(SMALL, keepers=keepers):
                tasks.start_soon(open_another)
                await until(lambda: bool(logs))
                assert not opened.is_set()
            await opened.wait()
    assert [(one["event"], one["boxes"], one["max_boxes"]) for one in logs] == [("sandbox.waiting", 1, 1)]
    await keepers.aclose()


async def test_a_box_that_has_had_its_time_has_ended_and_says_so(warm: None) -> None:
    limits = BoxLimits(box_wall_s=0.1)
    async with sandbox(limits) as box:
        with pytest.raises(RolloutError, match=r"the box has ended, and its files are gone: it is older than 0\.1 s"):
            await box.run("sleep 60")
        with pytest.raises(RolloutError, match="older"):
            await box.read("x")


async def test_a_box_that_has_used_its_processor_time_has_ended_and_says_so(warm: None) -> None:
    async with sandbox(BoxLimits(box_cpu_s=0.2)) as box:
        with pytest.raises(RolloutError, match=r"used more than 0\.2 s of processor time"):
            await box.run("while :; do (for n in {1..1000}; do :; done); done")


async def test_a_box_whose_keeper_is_killed_has_ended_and_the_next_one_opens(warm: None) -> None:
    async with sandbox(SMALL) as box:
        assert box._keeper._process is not None
        box._keeper._process.kill()
        with pytest.raises(RolloutError, match="the box has ended"):
            await box.run("sleep 60")
    async with sandbox(SMALL) as box:
        assert await is_whole(box)


async def test_a_box_that_somebody_has_kept_is_not_the_next_one(warm: None) -> None:
    async with sandbox() as kept:
        await kept.run("touch made")

    async with sandbox() as box:
        await box.run("touch own")
        for again in (kept.run("ls"), kept.read("made"), kept.write("own", ""), kept.snapshot(), kept.reset()):
            with pytest.raises(RolloutError, match=r"the box has ended, .*: it was closed"):
                await again
        assert await said(box, "ls") == "own"


async def test_an_error_of_the_workflow_leaves_as_it_is(warm: None) -> None:
    with pytest.raises(ZeroDivisionError):
        async with sandbox(SMALL):
            raise ZeroDivisionError


async def test_where_a_wall_of_a_box_does_not_hold_none_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.sandbox.box.BOX_ESCAPES", {"a gap": "echo through"})
    keepers = BoxKeepers()
    with pytest.raises(UserError, match="the wall against 'a gap' does not hold on this machine"):
        async with sandbox(keepers=keepers):
            pass
    await keepers.aclose()


async def test_where_namespaces_are_forbidden_the_cause_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'no permissions to create a new namespace' >&2\nexit 1\n")
    for path in (tmp_path, broken):
        path.chmod(0o755)
    monkeypatch.setattr("areal_async.sandbox.worker.find_bubblewrap", lambda: broken)
    with pytest.raises(UserError, match=r"isolated on this machine: .*no permissions to create a new namespace"):
        async with sandbox(keepers=BoxKeepers()):
            pass


def test_attempts_are_as_many_as_promised() -> None:
    assert len(BOX_ESCAPES) >= 40
    assert BoxKeeper.INSIDE["capabilities"] == ["CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE"]
