"""Kill inference servers at random while a run goes on, then prove that nobody noticed but the log.

    python -m tools.kill_servers                                        # two real SGLang servers, ten kills
    python -m tools.kill_servers --config configs/gsm8k_cpu.yaml -- --inference.num_servers 2

The run trains with a learning rate that changes no weight, so every token it ever sampled must have the logprob
that one forward pass over the start model gives it: a token lost, doubled or stitched to the wrong prefix does not.
Each kill is SIGKILL to a server and all it started, and the next comes after both servers are back in the pool.
Exits with 1 unless every kill was survived: no slot and no group failed, every group trained whole and once, the
largest difference between a sampled logprob and the forward pass is below 1e-4, and the server is back each time.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM

from areal_async.bus import Bus, Role, credentials_for, open_bus
from areal_async.config.settings import Settings
from areal_async.inference.http import ServerApi, make_client
from areal_async.launch.run_directory import RunDirectory
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.types import Outcome, OutcomeKind
from areal_async.protocol.wire import decode

RUNS = Path("runs")
RUN_NAME = "kill-servers"
NO_RATE = "1e-30"
"""A learning rate above 0, as settings demand, that moves no float32 weight."""
MAX_LOGPROB_GAP = 1e-4
RETURN_DEADLINE_S = 240.0
POLL_S = 0.2
BUSY_POLL_S = 0.01
MAX_BUSY_POLLS = 2000
BATCH_TRAJECTORIES = 64


@dataclass(slots=True)
class Findings:
    """The measurements made while the run went on."""

    returns_s: list[float] = field(default_factory=list)
    """Times from each kill until both servers were serviceable again."""
    failed_groups: list[str] = field(default_factory=list)


def serving(states: list[ServerState], num_servers: int) -> bool:
    """Say whether every server is in the pool with an announced version."""
    return len(states) == num_servers and all(state.version and not state.fenced for state in states)


async def server_states(bus: Bus) -> list[ServerState]:
    """Return what the node last said of each server."""
    return [state for state, _ in (await bus.entries("server.", ServerState)).values()]


async def wait_serving(bus: Bus, num_servers: int, *, without_url: str = "") -> list[ServerState]:
    """Wait until all servers serve, none of them where the killed one did: each start takes another port."""
    with anyio.fail_after(RETURN_DEADLINE_S):
        while True:
            states = await server_states(bus)
            if serving(states, num_servers) and without_url not in [state.url for state in states]:
                return states
            await anyio.sleep(POLL_S)


async def wait_busy(state: ServerState) -> None:
    """Wait until the server decodes something, so that its end breaks streams; give up after a while on an idle run."""
    async with make_client(max_connections=1) as http:
        api = ServerApi(http, state.url)
        for _ in range(MAX_BUSY_POLLS):
            if (await api.load(deadline_s=RETURN_DEADLINE_S)).num_running:
                return
            await anyio.sleep(BUSY_POLL_S)


def kill(state: ServerState) -> None:
    """End the process group of the server that listens at the state's address."""
    port = state.url.rpartition(":")[2]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "--port" in words and words[words.index("--port") + 1] == port:
            os.killpg(os.getpgid(int(entry.name)), signal.SIGKILL)
            return
    raise RuntimeError(f"server {state.server_id}: no process has --port {port}")


async def torment(settings: Settings, directory: RunDirectory, *, num_kills: int, seed: int) -> Findings:
    """Kill one of the servers ``num_kills`` times, each time after all were well for a random while."""
    rng, findings = random.Random(seed), Findings()
    async with open_bus(
        directory.read_bus_url(),
        names=settings.names,
        role=Role.OPERATOR,
        instance="kill-servers",
        credentials=credentials_for(settings, directory.path, Role.OPERATOR),
        operation_deadline_s=settings.bus.operation_deadline_s,
    ) as bus:
        states = await wait_serving(bus, settings.inference.num_servers)
        for number in range(1, num_kills + 1):
            await anyio.sleep(rng.uniform(1.0, 6.0))
            victim = rng.choice(states)
            await wait_busy(victim)
            kill(victim)
            killed = time.monotonic()
            states = await wait_serving(bus, settings.inference.num_servers, without_url=victim.url)
            findings.returns_s.append(time.monotonic() - killed)
            print(f"kill {number}: {victim.server_id} back after {findings.returns_s[-1]:.1f} s", flush=True)
        await anyio.sleep(rng.uniform(3.0, 6.0))
        for message in await bus.read_log(bus.names.outcomes_stream, bus.names.log):
            if message.subject == bus.names.outcomes:
                outcome = decode(message.data, Outcome)
                if outcome.kind in (OutcomeKind.FAILED, OutcomeKind.DEAD):
                    findings.failed_groups.append(f"{outcome.group_id}: {outcome.reason}")
    return findings


def trained_rows(directory: Path) -> list[dict[str, Any]]:
    """Return every trained trajectory of the surviving lineage."""
    return [row for path in sorted(directory.glob("trajectories/*.parquet")) for row in pq.read_table(path).to_pylist()]


def broken_streams(directory: Path) -> list[int]:
    """Return, for each stream that broke, the tokens received before it did."""
    lines = [json.loads(line) for path in directory.glob("logs/node*.jsonl") for line in path.read_text().splitlines()]
    return [line["num_tokens"] for line in lines if line.get("event") == "stream.broken"]


def _sequences(rows: list[dict[str, Any]]) -> Iterator[tuple[list[int], list[bool], list[float]]]:
    for row in rows:
        yield from zip(row["token_ids"], row["loss_mask"], row["logprobs"], strict=True)


@torch.no_grad()
def largest_gap(rows: list[dict[str, Any]], model_path: str) -> float:
    """Return the largest |sampled - teacher-forced| logprob over all sampled tokens."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    sequences = sorted(_sequences(rows), key=lambda one: len(one[0]))
    largest = 0.0
    for start in range(0, len(sequences), BATCH_TRAJECTORIES):
        batch = sequences[start : start + BATCH_TRAJECTORIES]
        length = max(len(ids) for ids, _, _ in batch)
        ids_BL = torch.tensor([ids + [0] * (length - len(ids)) for ids, _, _ in batch])
        valid_BL = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _, _ in batch])
        logits_BLV = model(input_ids=ids_BL, attention_mask=valid_BL).logits[:, :-1]
        forced_BL = logits_BLV.log_softmax(-1).gather(-1, ids_BL[:, 1:, None])[..., 0]
        for (ids, mask, logprobs), forced_L in zip(batch, forced_BL, strict=True):
            sampled = torch.tensor(mask[1:])
            difference_L = (forced_L[: len(ids) - 1] - torch.tensor(logprobs[1:]))[sampled]
            largest = max(largest, float(difference_L.abs().max()))
    return largest


def judge(settings: Settings, directory: Path, findings: Findings, *, num_kills: int) -> bool:
    """Print what was found; say whether it is as promised."""
    rows = trained_rows(directory)
    slots = Counter((row["group_id"], row["sibling"]) for row in rows)
    siblings = Counter(row["group_id"] for row in rows)
    incomplete = [group for group, count in siblings.items() if count != settings.rollout.group_size]
    broken = broken_streams(directory)
    gap = largest_gap(rows, settings.model.path)
    checks = {
        f"kills survived, the server back each time: {len(findings.returns_s)} of {num_kills}": (
            len(findings.returns_s) == num_kills
        ),
        f"streams broken {len(broken)}, of them with tokens already received {sum(map(bool, broken))}": bool(broken),
        f"groups failed: {len(findings.failed_groups)} {findings.failed_groups[:2]}": not findings.failed_groups,
        f"trained trajectories: {len(rows)}": bool(rows),
        f"trained twice: {sum(count - 1 for count in slots.values())}": max(slots.values(), default=1) == 1,
        f"groups trained incomplete: {len(incomplete)}": not incomplete,
        f"largest |sampled - teacher-forced| logprob: {gap:.1e}, must be below {MAX_LOGPROB_GAP:g}": (
            gap < MAX_LOGPROB_GAP
        ),
    }
    for text, is_so in checks.items():
        print(f"{'ok ' if is_so else 'NOT'} {text}")
    return all(checks.values())


def start_run(config: Path, settings: list[str]) -> subprocess.Popen[bytes]:
    """Start a run from the beginning that goes on until it is stopped."""
    command = [sys.executable, "-m", "areal_async", "run", "workflows/gsm8k.py", "--config", str(config), "--fresh"]
    command += ["--run.name", RUN_NAME, "--run.steps", "100000", "--eval.every_steps", "0"]
    command += ["--trainer.lr", NO_RATE, "--trainer.warmup_steps", "0", *settings]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def wait_started(directory: RunDirectory, process: subprocess.Popen[bytes]) -> None:
    """Wait until the run has a broker and has trained its first step."""
    while not (directory.path / "metrics.jsonl").exists():
        if process.poll() is not None:
            sys.exit(f"the run ended with status {process.returncode} before its first step")
        time.sleep(POLL_S)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/gsm8k_sglang_cpu.yaml"))
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("settings", nargs="*", help="settings for the run, after --")
    arguments = parser.parse_args()
    directory = RunDirectory(RUNS / RUN_NAME)
    (directory.path / "metrics.jsonl").unlink(missing_ok=True)
    with start_run(arguments.config, arguments.settings) as process:
        try:
            wait_started(directory, process)
            settings = directory.read_settings()
            findings = anyio.run(lambda: torment(settings, directory, num_kills=arguments.kills, seed=arguments.seed))
            process.send_signal(signal.SIGINT)
            process.wait()
        finally:
            process.terminate()
    sys.exit(0 if judge(settings, directory.path, findings, num_kills=arguments.kills) else 1)


if __name__ == "__main__":
    main()
