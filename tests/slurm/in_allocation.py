"""Runs inside an allocation of two hosts, starts steps by the backend, and prints what became of them as JSON.

srun --nodes=1 --ntasks=1 python -m tests.slurm.in_allocation FOLDER
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio

from areal_async.config.settings import BusSettings, Settings
from areal_async.doctor.preflight.reach import check_hosts
from areal_async.launch.backend import ProcessSpec
from areal_async.launch.process_group import run_together
from areal_async.launch.slurm import SlurmBackend
from areal_async.process.host import LOOPBACK
from tests.brokers import until

DEADLINE_S = 60
FAILS = "import os, sys; sys.exit(os.environ['GREETING'])"
SILENT = "import sys; sys.exit(3)"
LASTS = """
import os, signal, subprocess, sys, time
from pathlib import Path
from areal_async.process import stacks
stacks.install(Path(sys.argv[1]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", f"child of {sys.argv[1]}"])
print("begun", child.pid, flush=True)
try:
    time.sleep(300)
finally:
    print("child lives" if child.poll() is None else "child was ended", flush=True)
    child.kill()
"""
SEES = "import json, os; print(json.dumps({name: os.environ.get(name) for name in os.environ}))"
BROKERS = {
    "here": BusSettings(),
    "at the loopback": BusSettings(host=LOOPBACK),
    "nowhere": BusSettings(url="nats://10.87.0.2:9"),
}
CPUS = "import os; print(len(os.sched_getaffinity(0)))"


class Scene:
    """The backend, and a folder for what its steps say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backend = SlurmBackend()

    def spec(
        self, name: str, code: str, *words: str, host: str | None = None, environment: Mapping[str, str] | None = None
    ) -> ProcessSpec:
        """Return a step that runs a piece of Python."""
        return ProcessSpec(
            name=name, command=(sys.executable, "-c", code, *words), environment=environment or {}, host=host,
            output=self.folder / name,
        )  # fmt: skip

    async def lines(self, name: str, code: str, *, host: str | None = None) -> list[str]:
        """Return what a step prints."""
        process = await self.backend.start(self.spec(name, code, host=host))
        await process.wait()
        return (self.folder / name).read_text().splitlines()

    async def death(self, name: str, code: str) -> list[object]:
        """Return how a step's failure is told."""
        spec = self.spec(name, code, environment={"GREETING": "hello"})
        death = await run_together([spec], self.backend, on_start=lambda _: None)
        return [] if death is None else [death.status, death.sentence]

    async def ended(self, name: str, order: str, host: str) -> dict[str, object]:
        """Return how a step fares that is asked where it stands and is then ended."""
        stood = self.folder / f"{name}.stacks"
        process = await self.backend.start(self.spec(name, LASTS, str(stood), host=host))
        output = self.folder / name
        await until(lambda: "begun" in output.read_text(), within_s=DEADLINE_S)
        process.ask_stacks()
        await until(lambda: "File" in stood.read_text(), within_s=DEADLINE_S)
        getattr(process, order)()
        status = await process.wait()
        getattr(process, order)()  # has ended: nobody is asked again
        words = output.read_text()
        return {"status": status, "child_lived": "child lives" in words, "child": int(words.split()[1])}


async def _main() -> None:
    scene = Scene(Path(sys.argv[1]))
    first, second = scene.backend.hosts
    told: dict[str, object] = {"hosts": [first, second], "address": await scene.backend.address()}
    with anyio.fail_after(3 * DEADLINE_S):
        told["failed"] = await scene.death("failed", FAILS)
        told["silent"] = await scene.death("silent", SILENT)
        for host, place in ((first, "here"), (second, "there")):
            for order in ("terminate", "kill"):
                told[f"{order} {place}"] = await scene.ended(f"{order}-{place}", order, host)
        told["gpus there"] = json.loads((await scene.lines("sees", SEES, host=second))[0]).get("CUDA_VISIBLE_DEVICES")
        for name, bus in BROKERS.items():
            finding = await check_hosts(Settings(bus=bus), scene.backend)
            told[f"broker {name}"] = [finding.level, finding.saw]
        told["cpus"] = int((await scene.lines("cpus", CPUS))[0])
        told["own cpus"] = len(os.sched_getaffinity(0))
    del os.environ["SLURM_JOB_NODELIST"]
    told["address alone"] = await SlurmBackend().address() == LOOPBACK
    print(json.dumps(told))


if __name__ == "__main__":
    anyio.run(_main)
