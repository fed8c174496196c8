"""What more nodes cost those who speak with all of them, and what a million trajectories leave behind.

    python -m tools.bench_scale                            # 1, 4, 16, 64 and 256 nodes, about twenty minutes
    python -m tools.bench_scale --nodes 1 256 --rounds 5   # in turns, and the medians, where the machine's pace changes
    python -m tools.bench_scale --trajectories 1000000     # one run, as fast as it goes; then its restart

The controller, the broker and rank 0 are those of a run, but for the model: rank 0 takes as long for a step as the rate
says, and a node answers with ready-made tokens (``tools/scale_nodes.py``). Each node has a connection, leases,
heartbeats, metrics, services and polls of its own; up to 32 share a process. The rate is the same whatever the number
of nodes is, so what is more with more of them is theirs alone.

The first form prints, for each number of nodes, the processor seconds that broker, controller and rank 0 take for
1,000 trajectories, and the slowest tick of the two loops: the most processor time between two looks of 10 ms. Exits
with 1 where one of them is more than 1.3 times that of the first number of nodes.

The second prints memory, and what the run leaves on disk, every 100,000 trajectories, kills the controller and rank 0,
and says how long each takes to start again and how many messages it reads. Exits with 1 where the memory after the last
100,000 is more than 5 % above that after the first, or a restart takes 10 s.
"""

import argparse
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import msgspec

from areal_async.bus import EmbeddedBroker, Role, credentials_path, declare, open_bus
from areal_async.config.settings import BusSettings, RolloutSettings, RunSettings, Settings, TrainerSettings
from areal_async.config.tasks import DatasetSettings, TaskSettings
from tools.scale_nodes import WORKFLOW, Job, Line

NODES_PER_PROCESS = 32
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
MOST = 1.3
"""Of the cost of the first number of nodes."""
MOST_GROWTH = 1.05
MOST_RESTART_S = 10.0
EVERY = 100_000
"""Trajectories between two looks at memory."""
SETTLE_STEPS = 2
START_S = 60.0
"""After this time nodes that started at once know how many they are, and speak as seldom as they go on to."""
DEADLINE_S = 900.0
ROLES = ("broker", "controller", "rank 0")


@dataclass(kw_only=True)
class Scene:
    """A run under way."""

    settings: Settings
    broker: EmbeddedBroker
    folder: Path
    step_s: float
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, name: str, role: str, **told: float) -> None:
        """Start a process."""
        job = Job(
            settings=self.settings.model_dump(mode="json"),
            url=self.broker.url,
            file=str(self.folder / f"{name}.jsonl"),
            step_s=self.step_s,
            **told,  # type: ignore[arg-type]
        )
        module = ["tools.scale_nodes"] if role == "nodes" else ["tools.scale_roles", role]
        command = [sys.executable, "-m", *module, msgspec.json.encode(job).decode()]
        self.processes[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def kill(self, *names: str) -> None:
        """Kill processes, as a power-hungry neighbour would."""
        for name in names:
            process = self.processes.pop(name)
            process.kill()
            process.wait()

    def lines(self, name: str) -> list[Line]:
        """Return what a process has written."""
        path = self.folder / f"{name}.jsonl"
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        return [msgspec.json.decode(line, type=Line) for line in whole.splitlines()]

    def pid(self, role: str) -> int:
        """Return the process of a role."""
        return self.broker.pid if role == "broker" else self.processes["trainer" if role == "rank 0" else role].pid

    async def wait_step(self, step: int) -> Line:
        """Wait until rank 0 has trained a step."""
        with anyio.fail_after(DEADLINE_S):
            while not (lines := self.lines("trainer")) or lines[-1].step < step:
                self.check()
                await anyio.sleep(0.2)
        return lines[-1]

    async def wait_ready(self, name: str) -> Line:
        """Wait until a process has read what there was."""
        with anyio.fail_after(DEADLINE_S):
            while not (lines := self.lines(name)) or not lines[-1].note:
                self.check()
                await anyio.sleep(0.05)
        return lines[-1]

    def check(self) -> None:
        """End where a process has ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                sys.exit(f"{name} has ended with status {process.returncode}")


@asynccontextmanager
async def running(settings: Settings, *, num_nodes: int, step_s: float, told: dict[str, float]) -> AsyncIterator[Scene]:
    """A run of so many nodes."""
    broker = EmbeddedBroker(settings)
    await broker.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(broker.aclose)
        credentials = credentials_path(settings.run_directory, Role.OPERATOR)
        async with open_bus(broker.url, names=settings.names, role=Role.OPERATOR, credentials=credentials) as bus:
            await declare(bus, settings)
        scene = Scene(settings=settings, broker=broker, folder=settings.run.directory, step_s=step_s)
        stack.callback(lambda: scene.kill(*list(scene.processes)))
        scene.start("controller", "controller")
        scene.start("trainer", "trainer")
        for first in range(0, num_nodes, NODES_PER_PROCESS):
            count = min(NODES_PER_PROCESS, num_nodes - first)
            scene.start(f"nodes-{first}", "nodes", first=first, count=count, **told)
        yield scene


def settings_of(directory: Path, arguments: argparse.Namespace, *, num_nodes: int) -> Settings:
    """Return the settings of a run; those that are not here are the defaults."""
    in_flight = 2 * arguments.batch
    return Settings(
        run=RunSettings(name="scale", directory=directory, steps=1_000_000),
        tasks=(TaskSettings(workflow=f"workflows/{WORKFLOW}.py", dataset=DatasetSettings(path="none")),),
        rollout=RolloutSettings(
            group_size=arguments.group_size,
            min_group_size=1,
            batch_groups=arguments.batch // arguments.group_size,
            max_staleness=1,
            max_trajectories_per_node=max(arguments.group_size, 2 * in_flight // num_nodes),
            max_stream_bytes=4 << 30,
        ),
        trainer=TrainerSettings(checkpoint_every_steps=5),
        bus=BusSettings(max_disk_bytes=32 << 30),
    )


def worked_s(pid: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def resident_bytes(pid: int) -> int:
    """Return a process's resident set, without the files that are mapped into it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@dataclass(kw_only=True)
class Row:
    """What was measured of one number of nodes."""

    num_nodes: int
    rate: float
    """Trajectories per second."""
    cost_s: dict[str, float]
    """Processor seconds of 1,000 trajectories, by role."""
    tick_s: dict[str, float]
    """Slowest tick of a role's loop."""


async def measure(arguments: argparse.Namespace, num_nodes: int, folder: Path) -> Row:
    """Run so many nodes, and measure over some steps."""
    settings, batch = settings_of(folder, arguments, num_nodes=num_nodes), arguments.batch
    told = {"num_tokens": arguments.tokens, "answer_s": arguments.answer_s}
    async with running(settings, num_nodes=num_nodes, step_s=batch / arguments.rate, told=told) as scene:
        await anyio.sleep(START_S)
        first = await scene.wait_step(SETTLE_STEPS)
        before = {role: worked_s(scene.pid(role)) for role in ROLES}
        last = await scene.wait_step(first.step + arguments.steps)
        after = {role: worked_s(scene.pid(role)) for role in ROLES}
        num = (last.step - first.step) * batch
        ticks = {
            role: max(one.tick_s for one in scene.lines(name) if first.at_s < one.at_s <= last.at_s)
            for role, name in (("controller", "controller"), ("rank 0", "trainer"))
        }
        return Row(
            num_nodes=num_nodes,
            rate=num / (last.at_s - first.at_s),
            cost_s={role: 1000 * (after[role] - before[role]) / num for role in ROLES},
            tick_s=ticks,
        )


def print_table(rows: list[Row]) -> bool:
    """Print what was measured; say whether every row is within the bound of the first."""
    head = [f"{role}, s/1,000" for role in ROLES] + ["controller tick", "rank 0 tick"]
    print(f"{'nodes':>6}{'per second':>12}" + "".join(f"{cell:>24}" for cell in head))
    is_within = True
    for row in rows:
        cells = []
        for now, base, unit in [
            *((row.cost_s[role], rows[0].cost_s[role], "{:.3f}") for role in ROLES),
            *((1e3 * row.tick_s[role], 1e3 * rows[0].tick_s[role], "{:.1f} ms") for role in ROLES[1:]),
        ]:
            is_within &= now <= MOST * base
            cells.append(f"{unit.format(now)} ({now / base:.2f})")
        print(f"{row.num_nodes:>6}{row.rate:>12.0f}" + "".join(f"{cell:>24}" for cell in cells), flush=True)
    return is_within


def median(rows: list[Row]) -> Row:
    """Return the medians of several rounds of one number of nodes."""
    return Row(
        num_nodes=rows[0].num_nodes,
        rate=statistics.median(row.rate for row in rows),
        cost_s={role: statistics.median(row.cost_s[role] for row in rows) for role in rows[0].cost_s},
        tick_s={role: statistics.median(row.tick_s[role] for row in rows) for role in rows[0].tick_s},
    )


async def scale(arguments: argparse.Namespace) -> bool:
    """Measure every number of nodes, in turns."""
    rows: dict[int, list[Row]] = {num_nodes: [] for num_nodes in arguments.nodes}
    is_within = True
    for _ in range(arguments.rounds):
        for num_nodes, of_number in rows.items():
            with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
                of_number.append(await measure(arguments, num_nodes, Path(folder)))
            is_within = print_table([median(row) for row in rows.values() if row])
    return is_within


async def stored_bytes(scene: Scene) -> dict[str, int]:
    """Return what the streams that nothing is removed from hold, and what the run leaves in files."""
    settings, broker = scene.settings, scene.broker
    credentials = credentials_path(settings.run_directory, Role.OPERATOR)
    async with open_bus(broker.url, names=settings.names, role=Role.OPERATOR, credentials=credentials) as bus:
        log = await bus.stream_state(bus.names.outcomes_stream)
        keys = await bus.stream_state(f"KV_{bus.names.bucket}")
    folders = {"receipts": settings.run_directory / "produced", "ledger": settings.run_directory / "checkpoints"}
    files = {
        name: sum(file.stat().st_size for file in folder.iterdir()) if folder.exists() else 0
        for name, folder in folders.items()
    }
    return {"log": log.num_bytes, "keys": keys.num_bytes, **files}


async def many(arguments: argparse.Namespace) -> bool:
    """Have one run train so many trajectories, and start it again."""
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        settings = settings_of(Path(name), arguments, num_nodes=4)
        told = {"num_tokens": arguments.tokens, "answer_s": arguments.answer_s}
        async with running(settings, num_nodes=4, step_s=0.0, told=told) as scene:
            return await _watch_many(scene, arguments)


async def _watch_many(scene: Scene, arguments: argparse.Namespace) -> bool:
    started_s, memory = time.monotonic(), []
    for wanted in range(EVERY, arguments.trajectories + 1, EVERY):
        if time.monotonic() - started_s > 60 * arguments.minutes:
            break
        line = await scene.wait_step(-(-wanted // arguments.batch))
        num = line.step * arguments.batch
        memory.append({role: resident_bytes(scene.pid(role)) for role in ROLES})
        sizes = ", ".join(f"{role} {memory[-1][role] / 1e6:.1f} MB" for role in ROLES)
        log = await stored_bytes(scene)
        print(
            f"{num:>9,} trajectories, {num / (time.monotonic() - started_s):.0f}/s: {sizes}; "
            + ", ".join(f"{name} {size / (num / arguments.group_size):,.0f}" for name, size in log.items())
            + " bytes per group",
            flush=True,
        )
    growth = {role: memory[-1][role] / memory[0][role] for role in ROLES[1:]}
    print("memory, last to first: " + ", ".join(f"{role} {ratio:.3f}" for role, ratio in growth.items()))
    for name in [name for name in scene.processes if name.startswith("nodes")]:
        scene.processes[name].send_signal(signal.SIGTERM)
    scene.kill(*list(scene.processes))
    restart_s = {}
    for name in ("trainer", "controller"):
        (scene.folder / f"{name}.jsonl").unlink()
        scene.start(name, name)
        note = (await scene.wait_ready(name)).note
        restart_s[name] = note["ready_s"]
        print(f"{name}: starts again in {note['ready_s']:.2f} s, with {note['num_read']:,.0f} messages read")
    is_flat = all(one <= MOST_GROWTH for one in growth.values())
    return is_flat and all(one < MOST_RESTART_S for one in restart_s.values())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument(
        "--rate", type=float, default=300.0, help="trajectories per second; 256 nodes hold it on two idle cores"
    )
    parser.add_argument("--rounds", type=int, default=1, help="in which the numbers of nodes take turns; medians count")
    parser.add_argument("--steps", type=int, default=10, help="training steps that are measured")
    parser.add_argument("--batch", type=int, default=4096, help="trajectories of a step")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=0, help="of a trajectory; 4,000, or 16 with --trajectories")
    parser.add_argument("--answer-s", type=float, default=0.0, help="for a group; 1, or 0.05 with --trajectories")
    parser.add_argument("--trajectories", type=int, default=0, help="train so many in one run, and start it again")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no other 100,000 after that")
    parser.add_argument("--directory", type=Path, default=None, help="where runs are made")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or len(set(arguments.nodes)) < len(arguments.nodes):
        parser.error("need --rounds of 1 or more, and each number of --nodes once")
    arguments.tokens = arguments.tokens or (16 if arguments.trajectories else 4_000)
    arguments.answer_s = arguments.answer_s or (0.05 if arguments.trajectories else 1.0)
    work = many if arguments.trajectories else scale
    is_well = anyio.run(work, arguments, backend_options={"use_uvloop": True})
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
