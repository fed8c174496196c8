"""Short programs per second in the sandbox, and what a box costs beside bubblewrap alone.

    python -m tools.bench_sandbox                 # 600 programs per row
    python -m tools.bench_sandbox --sizes 1 2 4
    python -m tools.bench_sandbox --boxes 200     # 200 boxes instead: create, run a command, reset
    python -m tools.bench_sandbox --boxes 200 --peer PYTHON  # and agentdocker-lite, where that interpreter has it

`x bare` is the rate relative to `python -I -S` processes, as many at once, in the same run.

Of boxes there are medians in milliseconds, one after the other in turn: `create` up to the first command's
answer, `execute` of one that starts a program, and `reset` up to the next answer, with the files as they were. Alone,
bubblewrap has a bash that is told by lines which end with a word, and is reset by starting another.
"""

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack

import anyio
import anyio.to_thread
import structlog
import uvloop

from areal_async.sandbox import Sandbox, sandbox
from areal_async.sandbox.enter import NOBODY
from areal_async.sandbox.worker import find_bubblewrap

SOURCE = "print(sum(map(int, input().split())))"
STDIN, STDOUT = b"1 2\n", b"3\n"
COMMAND = "ls /usr > listed; cat listed"
PHASES = ("create", "execute", "reset", "all three")
Times = tuple[float, float, float]
"""Seconds of the phases."""


def run_bare() -> None:
    """Run the program without a sandbox."""
    command = [sys.executable, "-I", "-S", "-c", SOURCE]
    assert subprocess.run(command, input=STDIN, capture_output=True, check=True).stdout == STDOUT


async def rate_bare(num_programs: int, size: int) -> float:
    """Return bare programs per second, ``size`` at once."""
    limiter = anyio.CapacityLimiter(size)
    started = time.monotonic()
    async with anyio.create_task_group() as tasks:
        for _ in range(num_programs):
            tasks.start_soon(lambda: anyio.to_thread.run_sync(run_bare, limiter=limiter))
    return num_programs / (time.monotonic() - started)


async def rate_sandboxed(num_programs: int, size: int) -> float:
    """Return sandboxed programs per second, ``size`` at once."""
    async with Sandbox(size=size) as programs:

        async def run() -> None:
            execution = await programs.run(SOURCE, stdin=STDIN)
            assert execution.stdout == STDOUT, execution

        started = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for _ in range(num_programs):
                tasks.start_soon(run)
        return num_programs / (time.monotonic() - started)


async def measure(arguments: argparse.Namespace) -> None:
    """Print a row per size."""
    print(f"{'at once':>8}{'bare /s':>10}{'sandbox /s':>12}{'x bare':>8}   ({os.cpu_count()} cores)")
    for size in arguments.sizes:
        bare = await rate_bare(arguments.programs, size)
        sandboxed = await rate_sandboxed(arguments.programs, size)
        print(f"{size:>8}{bare:>10.0f}{sandboxed:>12.0f}{sandboxed / bare:>8.2f}", flush=True)


class BubblewrapAlone:
    """A bash under bubblewrap, with the namespaces and folders of a box and nothing else of it."""

    def __init__(self) -> None:
        arguments = [str(find_bubblewrap()), "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
        arguments += ["--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--ro-bind", "/usr", "/usr"]
        for name in ("bin", "lib", "lib64"):
            arguments += ["--symlink", f"usr/{name}", f"/{name}"]
        arguments += ["--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/workspace", "--chdir", "/workspace"]
        arguments += [
            "--clearenv",
            "--setenv",
            "LANG",
            "C.UTF-8",
            "--setenv",
            "PATH",
            "/usr/bin",
            "--",
            "/usr/bin/bash",
            "--noprofile",
            "--norc",
        ]
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, command: str) -> bytes:
        """Run a command; return what it prints."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\necho; echo THE-END\n".encode())
        self._process.stdin.flush()
        printed = b""
        while not printed.endswith(b"\nTHE-END\n"):
            printed += os.read(self._process.stdout.fileno(), 1 << 16)
        return printed.removesuffix(b"\nTHE-END\n")

    def end(self) -> None:
        """End it and all that runs in it."""
        self._process.kill()
        self._process.wait()


def time_alone() -> Times:
    """Time bubblewrap alone."""
    started = time.monotonic()
    box = BubblewrapAlone()
    box.run("echo")
    created = time.monotonic()
    assert b"bin" in box.run(COMMAND)
    executed = time.monotonic()
    box.end()
    box = BubblewrapAlone()
    assert b"listed" not in box.run("ls")
    reset = time.monotonic()
    box.end()
    return created - started, executed - created, reset - executed


async def time_box() -> Times:
    """Time a box of ours."""
    started = time.monotonic()
    async with sandbox() as box:
        await box.run("echo")
        created = time.monotonic()
        done = await box.run(COMMAND)
        assert b"bin" in done.output, done
        executed = time.monotonic()
        await box.reset()
        assert b"listed" not in (await box.run("ls")).output
        reset = time.monotonic()
    return created - started, executed - created, reset - executed


PEER = """
import json, os, sys, tempfile, time
from agentdocker_lite import Sandbox, SandboxConfig
root = tempfile.mkdtemp()
for name in ("usr", "tmp", "workspace", "dev", "proc", "etc"):
    os.mkdir(f"{root}/{name}")
for name in ("bin", "lib", "lib64"):
    os.symlink(f"usr/{name}", f"{root}/{name}")
config = SandboxConfig(image=root, working_dir="/workspace", volumes=["/usr:/usr:ro"], net_isolate=True,
                       env_base_dir=tempfile.mkdtemp())
for number, line in enumerate(sys.stdin):
    started = time.monotonic()
    box = Sandbox(config, name=f"peer-{number}")
    box.run("echo")
    created = time.monotonic()
    assert "bin" in box.run(line.strip())[0]
    executed = time.monotonic()
    box.reset()
    assert "listed" not in box.run("ls")[0]
    reset = time.monotonic()
    box.delete()
    print(json.dumps([created - started, executed - created, reset - executed]), flush=True)
"""


class Peer:
    """A package for boxes from PyPI, in an interpreter of its own, that times itself."""

    def __init__(self, python: str, folder: str) -> None:
        environment = {**os.environ, "HOME": folder, "TMPDIR": folder}
        command = [python, "-c", PEER]
        if os.geteuid() == 0:  # it is nobody, as a box is
            os.chown(folder, NOBODY, NOBODY)
            command = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
        )

    def time(self) -> Times:
        """Time it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{COMMAND}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer has ended; see what it said above")
        create, execute, reset = map(float, line.strip("[]\n").split(","))
        return create, execute, reset

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


async def measure_boxes(arguments: argparse.Namespace) -> None:
    """Print a row per phase."""
    with ExitStack() as ending:
        others: dict[str, Callable[[], Times]] = {"bubblewrap": time_alone}
        if arguments.peer:
            peer = Peer(arguments.peer, ending.enter_context(tempfile.TemporaryDirectory()))
            ending.callback(peer.end)
            others["agentdocker-lite"] = peer.time
        times: dict[str, list[Times]] = {"box": [], **{name: [] for name in others}}
        async with sandbox():  # the first is started with the walls tried; those that wait are warm
            pass
        for _ in range(arguments.boxes):
            times["box"].append(await time_box())
            for name, look in others.items():
                times[name].append(look())
    print(f"{'median ms':<12}" + "".join(f"{name:>18}" for name in times) + f"{'box / bubblewrap':>20}")
    for place, phase in enumerate(PHASES):
        medians = {name: 1000 * statistics.median(_phase(one, place) for one in times[name]) for name in times}
        row = "".join(f"{median:>18.2f}" for median in medians.values())
        print(f"{phase:<12}{row}{medians['box'] / medians['bubblewrap']:>20.2f}")


def _phase(times: Times, place: int) -> float:
    return times[place] if place < len(times) else sum(times)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=600)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--boxes", type=int, help="measure so many boxes instead")
    parser.add_argument("--peer", help="an interpreter that has agentdocker-lite")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    arguments = parser.parse_args()
    uvloop.run(measure_boxes(arguments) if arguments.boxes else measure(arguments))


if __name__ == "__main__":
    main()
