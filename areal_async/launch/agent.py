"""The far end of another host: starts processes there, and lives no longer than who asks it to.

    ssh HOST python -m areal_async.launch.agent

Lines of JSON, orders on its standard input and news on its output; the first order says where to work and in which
environment. When its input ends, or nothing has come for ``SILENT_S`` (the other side sends a beat), all that it
started ends with it: a host that was cut off for so long is given up by the launcher too. Other ways than pipes carry
the same lines (``AgentServer``).
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec

from areal_async.errors import PipelineError
from areal_async.launch.backend import ProcessSpec
from areal_async.launch.local import LocalBackend, LocalProcess
from areal_async.process.plain_text import escaped

BEAT_S = 5.0
SILENT_S = 75.0
"""After so long without a word one side takes the other for gone. A network that is cut for 30 s, of which TCP makes
51, ends nothing."""
QUESTION_DEADLINE_S = 60.0
MAX_READ_BYTES = 1 << 16
START, TERMINATE, KILL, STACKS, RUN, BEAT = "start", "terminate", "kill", "stacks", "run", "beat"
VISIBLE = "CUDA_VISIBLE_DEVICES"
ENDED, ANSWER = "ended", "answer"


class Hello(msgspec.Struct):
    """The first order."""

    directory: str
    """To work in."""
    environment: dict[str, str]
    """Of who asks; what this host has set itself stands."""


class Order(msgspec.Struct, omit_defaults=True):
    """What is to be done."""

    do: str
    number: int = 0
    """The process, or the question."""
    name: str = ""
    command: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    output: str = ""

    @classmethod
    def to_start(cls, number: int, spec: ProcessSpec) -> "Order":
        output = str(spec.output) if spec.output is not None else ""
        environment = dict(spec.environment)
        return cls(START, number, name=spec.name, command=spec.command, environment=environment, output=output)

    @property
    def spec(self) -> ProcessSpec:
        """The process to start."""
        output = Path(self.output) if self.output else None
        return ProcessSpec(name=self.name, command=self.command, environment=self.environment, output=output)


class AgentNews(msgspec.Struct, omit_defaults=True):
    """What has happened."""

    say: str
    number: int = 0
    status: int = 0
    sentence: str = ""
    """The last line of a process that has ended; why a question failed; of a beat nothing."""
    code: str = ""
    """In the first news: ``code_digest``."""


class Agent:
    """Processes of this host, by numbers that who has them started gives."""

    def __init__(self, on_end: Callable[[int, int, str], None]) -> None:
        """``on_end`` takes number, exit status and last sentence of each process, also of one that cannot start."""
        self._on_end = on_end
        self._backend = LocalBackend()
        self._processes: dict[int, LocalProcess] = {}
        self._following: anyio.abc.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Be at work; at the end of the block nothing is left of what was started."""
        try:
            async with anyio.create_task_group() as self._following:
                try:
                    yield
                finally:
                    for process in self._processes.values():
                        process.kill()
                    self._following.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                for process in self._processes.values():
                    await process.wait()

    async def start(self, number: int, spec: ProcessSpec) -> None:
        """Start a process."""
        assert self._following is not None
        try:
            with anyio.CancelScope(shield=True):
                self._processes[number] = await self._backend.start(spec)
        except PipelineError as exc:
            self._on_end(number, 1, str(exc))
        else:
            self._following.start_soon(self._follow, number)

    def order(self, number: int, what: str) -> None:
        """Ask a process to end or where it stands, or kill it; nothing happens when it has ended."""
        process = self._processes.get(number)
        if process is not None:
            {TERMINATE: process.terminate, KILL: process.kill, STACKS: process.ask_stacks}[what]()

    async def _follow(self, number: int) -> None:
        process = self._processes[number]
        status = await process.wait()
        del self._processes[number]
        self._on_end(number, status, process.last_sentence())


async def run_question(command: tuple[str, ...]) -> tuple[int, str]:
    """Run a short command; return its status, and the last line of its errors where it failed."""
    try:
        with anyio.fail_after(QUESTION_DEADLINE_S):
            ended = await anyio.run_process(list(command), stdin=subprocess.DEVNULL, check=False)
    except (OSError, TimeoutError) as exc:
        return 1, str(exc) or f"no answer within {QUESTION_DEADLINE_S:g} s"
    lines = [line for line in ended.stderr.decode(errors="replace").splitlines() if line.strip()]
    return ended.returncode, escaped(lines[-1]) if lines else f"status {ended.returncode}"


@cache
def code_digest() -> str:
    """Return what tells whether two hosts have the same version of this package."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def settle(hello: Hello, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to work in: that of who asks, but for what this host says itself. Pure.

    And but for GPUs that who asks names otherwise than by numbers: there are none of these names here.
    """
    asked = dict(hello.environment)
    names = [name.strip() for name in asked.get(VISIBLE, "").split(",")]
    if any(name and not name.removeprefix("-").isdecimal() for name in names):
        del asked[VISIBLE]
    return {**asked, **environment}


async def read_lines(descriptor: int) -> AsyncIterator[bytes]:
    """Yield the lines of a pipe or a socket until its end."""
    rest = b""
    while True:
        await anyio.wait_readable(descriptor)
        if not (data := os.read(descriptor, MAX_READ_BYTES)):
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


class AgentServer:
    """An agent that obeys lines of orders, whatever carries them."""

    def __init__(self, lines: AsyncIterator[bytes], tell: Callable[[bytes], None]) -> None:
        """``tell`` takes each line of news."""
        self._lines = lines
        self._write = tell
        self._heard = anyio.current_time()
        self._agent = Agent(lambda number, status, sentence: self._tell(AgentNews(ENDED, number, status, sentence)))

    async def run(self) -> None:
        """Obey until nobody gives orders any more."""
        with anyio.fail_after(SILENT_S):
            hello = msgspec.json.decode(await anext(self._lines), type=Hello)
        os.environ.update(settle(hello, os.environ))
        os.chdir(hello.directory)
        self._tell(AgentNews(BEAT, code=code_digest()))
        async with self._agent.running(), anyio.create_task_group() as tasks:
            tasks.start_soon(self._run_beats, tasks.cancel_scope)
            await self._obey(tasks)
            tasks.cancel_scope.cancel()

    async def _obey(self, tasks: anyio.abc.TaskGroup) -> None:
        async for line in self._lines:
            self._heard = anyio.current_time()
            order = msgspec.json.decode(line, type=Order)
            if order.do == START:
                await self._agent.start(order.number, order.spec)
            elif order.do == RUN:
                tasks.start_soon(self._answer, order)
            elif order.do != BEAT:
                self._agent.order(order.number, order.do)

    async def _answer(self, order: Order) -> None:
        self._tell(AgentNews(ANSWER, order.number, *await run_question(order.command)))

    async def _run_beats(self, everything: anyio.CancelScope) -> None:
        """Say that this agent lives, and end it when nobody says so of the other side.

        consumes:     the time of the last order
        waits for:    the next look
        produces:     beats
        unblocked by: cancellation alone
        """
        while anyio.current_time() < self._heard + SILENT_S:
            self._tell(AgentNews(BEAT))
            await anyio.sleep(BEAT_S)
        everything.cancel()

    def _tell(self, news: AgentNews) -> None:
        self._write(msgspec.json.encode(news) + b"\n")


def write_all(descriptor: int, data: bytes) -> None:
    """Write to a pipe, however little it takes at a time."""
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> Any:
    """Serve whoever started this process."""
    output = os.dup(1)
    os.dup2(2, 1)  # what else is printed here is no news

    async def serve() -> None:
        await AgentServer(read_lines(0), partial(write_all, output)).run()

    try:
        anyio.run(serve)
    except* (BrokenPipeError, StopAsyncIteration, TimeoutError):  # who gives orders is gone
        sys.exit(1)


if __name__ == "__main__":
    main()
