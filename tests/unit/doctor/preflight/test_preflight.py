"""``doctor`` before a run: what is wrong is found before anything is started, each with its cure."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from areal_async.cli.main import main
from areal_async.config.settings import BusSettings, RolloutSettings, RunSettings, Settings, TrainerSettings
from areal_async.doctor.preflight.broker import check_broker, judge_varz
from areal_async.doctor.preflight.findings import Level
from areal_async.doctor.preflight.host import check_clock, check_disk, check_limits, check_processes
from areal_async.doctor.preflight.machine import Machine, look_at_machine, parse_gpus
from areal_async.doctor.preflight.memory import ModelSize
from areal_async.doctor.preflight.reach import check_alike, check_hosts
from areal_async.launch.agent import run_question
from areal_async.launch.local import LocalBackend

ROOT = Path(__file__).parents[4]
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def _machine(**given: Any) -> Machine:
    seen = {"num_cores": 2, "memory_bytes": None, "gpus": (), "open_files": 4096, "shared_memory_bytes": None}
    return Machine(**seen | {"is_clock_kept": None} | given)


Doctor = Callable[..., tuple[int, list[dict[str, str]]]]
"""``doctor(*words)`` returns the exit status and what was found."""


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """The verb on a host without GPUs, without the seconds of a processor that a new interpreter takes."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def look(*words: str) -> tuple[int, list[dict[str, str]]]:
        status = main(["doctor", "--json", *words])
        told = capsys.readouterr()
        assert told.err == ""
        return status, json.loads(told.out)

    return look


def test_the_cpu_job_may_start_and_every_check_has_spoken(tmp_path: Path) -> None:
    """The command that a user types first, whole."""
    ended = subprocess.run(
        [sys.executable, "-m", "areal_async", "doctor", "--json", "workflows/gsm8k.py", "--run.directory", tmp_path],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    findings = json.loads(ended.stdout)
    assert not [one for one in findings if one["level"] == "error"]
    checks = {one["check"].partition(" ")[0] for one in findings}
    assert checks >= {
        "versions", "inference", "broker", "ports", "hosts", "cores", "workflow", "data", "held-out", "model", "chat",
        "memory", "disk", "limits", "clock",
    }  # fmt: skip


def test_everything_that_is_wrong_is_told_at_once_with_its_cure(doctor: Doctor, tmp_path: Path) -> None:
    """One look, not one mistake per start: a taken port, data that is not there or without a row, a model without
    weights, a node's open files.
    """
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, findings = doctor(
            "workflows/gsm8k.py",
            *("--run.directory", str(tmp_path)),
            *("--model.path", str(tmp_path / "model")),
            *("--tasks.0.dataset.path", str(tmp_path / "no.jsonl")),
            *("--eval.dataset.path", str(tmp_path / "empty.jsonl")),
            *("--bus.port", str(taken.getsockname()[1])),
            *("--rollout.max_trajectories_per_node", "100000000"),
        )
    wrong = {one["check"]: one for one in findings if one["level"] == "error"}
    assert status == 1
    assert set(wrong) == {"ports", "data of gsm8k", "held-out data of gsm8k", "model actor", "limits"}
    assert all(one["cure"] for one in wrong.values())
    assert "is taken" in wrong["ports"]["saw"]


def test_a_broker_that_syncs_now_and_then_is_a_warning_and_one_that_always_does_is_not() -> None:
    """The broker's own page tells; P1 rests on it."""
    page = {"jetstream": {"config": {"sync_interval": 120_000_000_000}}, "now": NOW.isoformat()}
    (disk, clock) = judge_varz(page, now=NOW)
    assert disk.level is Level.WARNING
    assert "every 120 s" in disk.saw
    assert clock.level is Level.GOOD
    page["jetstream"] = {"config": {"sync_always": True, "sync_interval": 120_000_000_000}}
    assert judge_varz(page, now=NOW)[0].level is Level.GOOD


@pytest.mark.parametrize(
    ("meta", "saw"),
    [
        (None, "1 servers store, led by none of them"),
        ({"cluster_size": 2, "leader": "a"}, "2 servers store, led by a"),
        ({"cluster_size": 3}, "3 servers store, led by none of them"),
        ({"cluster_size": 3, "leader": "a", "replicas": [{"name": "b", "offline": True}]}, "led by a; away: b"),
    ],
)
def test_three_copies_want_three_servers_that_are_there_and_sync(meta: dict[str, Any] | None, saw: str) -> None:
    page = {"jetstream": {"config": {"sync_interval": 120_000_000_000}, "meta": meta}, "now": NOW.isoformat()}

    (disk, servers, _) = judge_varz(page, now=NOW, replicas=3)

    assert (disk.level, servers.level) == (Level.WARNING, Level.ERROR)
    assert "3 copies do not outlive" in disk.saw
    assert servers.saw.endswith(saw)
    whole = {"cluster_size": 3, "leader": "a", "replicas": [{"name": "b", "current": True}]}
    page["jetstream"] = {"config": {"sync_always": True}, "meta": whole}
    assert {one.level for one in judge_varz(page, now=NOW, replicas=3)} == {Level.GOOD}


def test_a_broker_with_another_time_is_a_warning() -> None:
    """A minute off: logs of two hosts cannot be laid side by side."""
    page = {"jetstream": {"config": {"sync_always": True}}, "now": (NOW - timedelta(seconds=60)).isoformat()}
    assert judge_varz(page, now=NOW)[1].level is Level.WARNING
    assert len(judge_varz({}, now=NOW)) == 1


@pytest.mark.anyio
async def test_a_broker_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    """With the address that was tried."""
    settings = Settings(run=RunSettings(directory=tmp_path), bus=BusSettings(url="nats://127.0.0.1:9"))
    (finding,) = await check_broker(settings)
    assert finding.level is Level.ERROR
    assert "127.0.0.1:9" in finding.saw


def test_a_run_for_an_allocation_is_looked_at_inside_of_one(doctor: Doctor, tmp_path: Path) -> None:
    """Outside there are no hosts to be seen, and a run with these settings would not start."""
    status, findings = doctor("workflows/gsm8k.py", "--run.directory", str(tmp_path), "--launch.backend", "slurm")

    (hosts,) = [one for one in findings if one["level"] == "error"]
    assert (status, hosts["check"]) == (1, "hosts")
    assert hosts["saw"].startswith("launch.backend: got slurm on a host outside of the allocation")
    assert hosts["cure"] == "start it with sbatch, or by srun inside"


class _Two(LocalBackend):
    """An allocation of two hosts, the other of which is this one."""

    hosts = ("here", "there")

    async def cannot_run(self, code: str, *words: str) -> Mapping[str, str]:
        status, said = await run_question((sys.executable, "-c", code, *words))
        return {"there": said} if status else {}


class _Elsewhere(_Two):
    """The other host has no file of this one's."""

    async def cannot_run(self, code: str, *words: str) -> Mapping[str, str]:
        return await super().cannot_run(code, *(word.replace("/", "/elsewhere/") for word in words))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("bus", "level", "saw", "cure"),
    [
        ({}, Level.GOOD, "this one alone; nodes of others cannot join, as the broker's address is 127.0.0.1", ""),
        (
            {"host": "192.0.2.1"},
            Level.ERROR,
            "bus.host: got '192.0.2.1', need an IPv4 address or a name of this",
            "change",
        ),
        ({"url": "nats://192.0.2.1"}, Level.GOOD, "nodes of others join at the broker's address 192.0.2.1", ""),
        ({"url": "nats://no host:1"}, Level.ERROR, "bus: got the address 'no host', which is none", "correct bus.url"),
        ({"url": "nats://h:99999"}, Level.ERROR, "bus.url: got 'nats://h:99999': Port out of range", "write it like"),
    ],
)
async def test_a_host_alone_is_told_whether_others_could_join(
    bus: dict[str, Any], level: Level, saw: str, cure: str
) -> None:
    finding = await check_hosts(Settings(bus=BusSettings(**bus)), LocalBackend())

    assert (finding.level, finding.cure.startswith(cure)) == (level, True), finding
    assert saw in finding.saw


@pytest.mark.anyio
@pytest.mark.parametrize("bus", [{}, {"host": "127.0.0.2"}, {"host": "localhost"}, {"url": "nats://localhost:4222"}])
async def test_a_loopback_is_no_address_of_the_broker_for_several_hosts(bus: dict[str, Any]) -> None:
    finding = await check_hosts(Settings(bus=BusSettings(**bus)), _Two())

    assert finding.level is Level.ERROR
    assert finding.saw.endswith("is the loopback, where there find themselves")
    assert finding.cure.endswith("that they reach")


@pytest.mark.anyio
async def test_a_broker_that_another_host_does_not_reach_is_told_with_why() -> None:
    nobody = BusSettings(url="nats://0.0.0.0:9")  # no loopback, and nothing listens at that port of this host

    finding = await check_hosts(Settings(bus=nobody), _Two())

    assert finding.level is Level.ERROR
    assert finding.saw.startswith("the broker's address 0.0.0.0:9 cannot be reached from there: ")


@pytest.mark.anyio
async def test_other_hosts_are_asked_for_this_code_and_for_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(run=RunSettings(directory=tmp_path / "runs"))

    assert await check_alike(settings, LocalBackend()) == []
    alike = await check_alike(settings, _Two())
    monkeypatch.setattr("areal_async.doctor.preflight.reach.code_digest", lambda: "older")
    (code, *_) = await check_alike(settings, _Two())

    assert [(one.check, one.level) for one in alike] == [
        ("code of other hosts", Level.GOOD),
        ("run directory of other hosts", Level.GOOD),
    ]
    assert (code.level, code.saw) == (
        Level.ERROR,
        "there: another version of areal_async is there; install this one",
    )
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.anyio
async def test_a_run_directory_that_another_host_does_not_see_is_an_error(tmp_path: Path) -> None:
    settings = Settings(run=RunSettings(directory=tmp_path))

    _, seen = await check_alike(settings, _Elsewhere())

    assert (seen.level, seen.cure) == (Level.ERROR, "set run.directory to a file system that they share")
    assert "No such file or directory" in seen.saw


def test_a_disk_that_cannot_hold_the_checkpoints_is_an_error(tmp_path: Path) -> None:
    """Twelve bytes a parameter, for each that is kept and the one being written."""
    settings = Settings(run=RunSettings(directory=tmp_path), trainer=TrainerSettings(keep_checkpoints=9))
    vast = ModelSize(
        num_parameters=10**13, num_layers=1, hidden=1, kv_width=1, intermediate=1, is_tied=True, vocab=1, context=1
    )
    (finding,) = check_disk(settings, {"actor": vast})
    assert finding.level is Level.ERROR
    assert "checkpoints 1200000.0 GB" in finding.saw


def test_threads_beyond_the_cores_and_files_beyond_the_limit_are_told(tmp_path: Path) -> None:
    """The former only costs time."""
    crowded = Settings(run=RunSettings(directory=tmp_path), trainer=TrainerSettings(num_threads=8))
    (cores,) = check_processes(crowded, _machine())
    assert cores.level is Level.WARNING
    (cores,) = check_processes(Settings(), _machine(num_cores=1), _Two())
    assert (cores.level, cores.saw) == (Level.GOOD, "1 busy threads on 1 cores, no GPU"), "the servers are there"
    many = Settings(rollout=RolloutSettings(max_trajectories_per_node=4096))
    (limits,) = check_limits(many, _machine(open_files=1024))
    assert limits.level is Level.ERROR
    (clock,) = check_clock(_machine(is_clock_kept=False))
    assert clock.level is Level.WARNING


def test_only_visible_gpus_are_looked_at_by_number_or_name() -> None:
    """As ``CUDA_VISIBLE_DEVICES`` writes them."""
    table = "0, GPU-aa, NVIDIA H100, 81559, 80000\n1, GPU-bb, NVIDIA H100, 81559, 100\n"
    assert [gpu.free_bytes >> 20 for gpu in parse_gpus(table, ("1",))] == [100]
    assert [gpu.memory_bytes >> 20 for gpu in parse_gpus(table, ("GPU-aa",))] == [81559]
    assert parse_gpus("0, GPU-cc, NVIDIA GB10, [N/A], [N/A]\n", ("0",)) == []


def test_a_part_of_a_gpu_has_the_memory_of_its_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The driver's table has whole GPUs alone, and of one that is divided perhaps no numbers."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        """#!/bin/sh
case $1 in
-L) echo "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-a)"
    echo "  MIG 3g.20gb     Device  0: (UUID: MIG-x)"
    echo "  MIG 1g.5gb+me   Device  1: (UUID: MIG-y)";;
*) echo "0, GPU-a, NVIDIA A100-SXM4-40GB, [Insufficient Permissions], [Insufficient Permissions]";;
esac
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-y,MIG-x")

    gpus = look_at_machine().gpus

    assert [(gpu.name, gpu.memory_bytes) for gpu in gpus] == [("MIG 3g.20gb", 20 * 10**9), ("MIG 1g.5gb+me", 5 * 10**9)]


def test_this_host_tells_what_it_has() -> None:
    """Numbers that cannot be: none of them is a default."""
    machine = look_at_machine()
    assert machine.num_cores >= 1
    assert machine.open_files >= 256
    assert machine.memory_bytes is None or machine.memory_bytes > 1 << 20
