"""Agents run processes for a launcher elsewhere; they are real, and their hosts are this one."""

import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

from areal_async.config.launch import LaunchSettings
from areal_async.launch import agent
from areal_async.launch.agent import VISIBLE, AgentServer, Hello, Order, read_lines, settle, write_all
from areal_async.launch.backend import ProcessSpec
from areal_async.launch.hosts import HostsBackend
from areal_async.launch.remote import LOST_STATUS
from tests.brokers import until

pytestmark = pytest.mark.anyio

WORKS = "import os, time; print('works', os.getpid(), os.environ.get('HOST'), flush=True); time.sleep(600)"
FAILS = "import os, sys; sys.exit(os.environ['GREETING'])"


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[HostsBackend]:
    """Two other hosts, to the second of which there is no way until there is a file of its name."""
    script = tmp_path / "reach"
    script.write_text(
        f'#!/bin/sh\n[ "$1" != b ] || [ -e {tmp_path}/b ] || {{ echo no way to b >&2; exit 1; }}\n'
        'export HOST="$1"; shift; exec "$@"\n'
    )
    script.chmod(0o755)
    backend = HostsBackend(LaunchSettings(hosts=("a", "b"), remote_command=f"{shlex.quote(str(script))} {{host}}"))
    async with backend.running():
        yield backend


class _Scene:
    """Processes, and what they have written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def spec(self, name: str, code: str, host: str | None) -> ProcessSpec:
        return ProcessSpec(
            name=name, command=(sys.executable, "-S", "-c", code), environment={"GREETING": "out of luck"}, host=host,
            output=self.folder / name,
        )  # fmt: skip

    async def words(self, name: str) -> list[str]:
        """Return what a process says that works."""
        output = self.folder / name
        await until(lambda: output.exists() and "\n" in output.read_text(), within_s=60)
        return output.read_text().split()


@pytest.fixture
def scene(tmp_path: Path) -> _Scene:
    return _Scene(tmp_path)


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _agent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_a_process_of_another_host_is_told_of_as_one_of_this_one(backend: HostsBackend, scene: _Scene) -> None:
    assert backend.hosts == ("127.0.0.1", "a", "b")
    with anyio.fail_after(120):
        here = await backend.start(scene.spec("here", FAILS, None))
        asked = await backend.start(scene.spec("asked", WORKS, "a"))
        killed = await backend.start(scene.spec("killed", WORKS, "a"))
        failing = await backend.start(scene.spec("failing", FAILS, "a"))
        missing = await backend.start(ProcessSpec(name="none", command=("/no",), environment={}, host="a", output=None))

        for process in (here, failing):
            assert (await process.wait(), process.last_sentence()) == (1, "out of luck")
        assert await missing.wait() != 0
        for name in ("asked", "killed"):
            assert (await scene.words(name))[2] == "a"
        asked.terminate()
        killed.kill()
        assert await asked.wait() == -signal.SIGTERM
        assert await killed.wait() == -signal.SIGKILL


async def test_a_host_is_gone_with_its_agent_and_with_all_that_ran_there_and_comes_back(
    backend: HostsBackend, scene: _Scene
) -> None:
    assert dict(backend.absent) == {"b": "no way to b"}
    with anyio.fail_after(120):
        refused = await backend.start(scene.spec("refused", WORKS, "b"))
        assert (await refused.wait(), refused.last_sentence()) == (LOST_STATUS, "host b is gone: no way to b")
        working = await backend.start(scene.spec("working", WORKS, "a"))
        pid = int((await scene.words("working"))[1])

        with capture_logs() as logs:
            os.kill(_agent_of(pid), signal.SIGKILL)
            assert await working.wait() == LOST_STATUS
            await until(lambda: not backend.absent.get("a"), within_s=60)
        gone = [(line["host"], line["reason"]) for line in logs if line["event"] == "host.gone"]
        assert gone == [("a", "its agent ended with status -9")]
        await until(lambda: not _lives(pid))
        assert working.last_sentence() == "host a is gone: its agent ended with status -9"
        (scene.folder / "b").touch()
        await until(lambda: not backend.absent, within_s=60)
        for host in ("a", "b"):
            assert await (await backend.start(scene.spec(host + "-again", FAILS, host))).wait() == 1


async def test_questions_are_asked_on_every_other_host(backend: HostsBackend) -> None:
    asked = await backend.cannot_run("import sys; sys.exit(sys.argv[1])", "told")

    assert asked == {"a": "told", "b": "no way to b"}
    assert await backend.cannot_run("pass") == {"b": "no way to b"}


@pytest.mark.parametrize("by", ["end", "silence"])
async def test_an_agent_that_nobody_speaks_to_ends_all_that_it_started(
    scene: _Scene, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(agent, "SILENT_S", 600.0 if by == "end" else 5.0)
    monkeypatch.setattr(agent, "BEAT_S", 0.1)
    (theirs, orders), (news, output) = os.pipe(), os.pipe()
    hello = Hello(directory=os.getcwd(), environment={})
    for order in (hello, Order.to_start(1, scene.spec("working", WORKS, None))):
        os.write(orders, msgspec.json.encode(order) + b"\n")

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(AgentServer(read_lines(theirs), partial(write_all, output)).run)
            pid = int((await scene.words("working"))[1])
            assert _lives(pid)
            if by == "end":
                os.close(orders)

    assert not _lives(pid)
    for descriptor in (theirs, news, output, *((orders,) if by == "silence" else ())):
        os.close(descriptor)


@pytest.mark.parametrize(("own", "taken"), [({}, "1,2"), ({"GPUS": ""}, ""), ({"GPUS": "3"}, "3")])
async def test_what_a_host_says_itself_stands(own: Mapping[str, str], taken: str) -> None:
    told = settle(Hello(directory="/", environment={"GPUS": "1,2", "HUB": "mirror"}), own)

    assert (told["GPUS"], told["HUB"]) == (taken, "mirror")


@pytest.mark.parametrize(
    ("asked", "here", "seen"),
    [
        ("GPU-a,GPU-b", None, None), ("MIG-a", "1", "1"), ("0,1", None, "0,1"), ("", None, ""), ("-1", None, "-1"),
        ("0", "2,3", "2,3"), (None, None, None),
    ],
)  # fmt: skip
def test_a_host_has_no_gpus_of_the_names_that_the_launchers_have(
    asked: str | None, here: str | None, seen: str | None
) -> None:
    """Nor does it lack any that it has: a run that is to have no GPUs has none anywhere."""
    told, own = ({} if names is None else {VISIBLE: names} for names in (asked, here))

    assert settle(Hello(directory="/", environment=told), own).get(VISIBLE) == seen
