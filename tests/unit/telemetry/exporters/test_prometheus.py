"""A process's numbers as Prometheus scrapes them, and the monitoring files that rest on their names."""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from areal_async.config.settings import MetricsSettings, RunSettings, Settings
from areal_async.errors import UserError
from areal_async.telemetry.exporters.prometheus import HOST, NAMESPACE, PID, _own_labels, exporting, write_target
from areal_async.telemetry.exporters.samples import (
    ARM,
    CONTROLLER,
    NODE,
    SERVER,
    STEP,
    TRAINER,
    samples,
    step_samples,
)

MONITORING = Path(__file__).parents[4] / "configs" / "monitoring"
NODE_REPORT = {
    "node_id": "n0",
    "state": "runs 2 groups",
    "num_scored": 7,
    "num_failed": 1,
    "num_rejected": 0,
    "num_generated_tokens": 900,
    "servers": {
        "n0-0": {
            "version": "1-4",
            "fence": "",
            "num_requests": 3,
            "limit": 8,
            "outstanding_tokens": 40,
            "frozen": "",
            "num_generated_tokens": 900,
            "num_first_tokens": 9,
            "first_token_total_s": 1.5,
            "num_swaps": 4,
            "swap_total_s": 0.25,
            "tokens_per_s": 12.5,
            "first_token_mean_s": None,
        },  # fmt: skip
        "n0-1": {"version": "", "fence": "its process ended", "num_requests": 0, "frozen": "grader"},
    },
}
LINE = {
    "step": 4,
    "weights_version": "1-4",
    "reward_mean": 0.5,
    "time_train_s": 2.0,
    "num_groups": 16,
    "reward/gsm8k": 0.4,
    "groups/gsm8k": 16,
    "staleness_tokens/1": 300,
    "reward_at_age/1": 0.6,
    "info/turns": 2.0,
    "alarm_names": "equal_rewards",
}


def _settings(tmp_path: Path, **metrics: Any) -> Settings:
    return Settings(run=RunSettings(name="seen", directory=tmp_path), metrics=MetricsSettings(**metrics))


def _by_name(role: str, report: dict[str, Any]) -> dict[tuple[str, ...], float]:
    return {(one.name, *one.labels.values()): one.value for one in samples(role, report)}


def test_a_nodes_servers_are_told_apart_and_a_fence_is_a_number() -> None:
    """So that an alert can name the server."""
    seen = _by_name("node", NODE_REPORT)
    assert seen["areal_trajectories_total", "scored"] == 7
    assert seen["areal_server_fenced", "n0-0", "policy"] == 0
    assert seen["areal_server_fenced", "n0-1", "grader"] == 1
    assert seen["areal_server_weights_step", "n0-0", "policy"] == 4
    assert seen["areal_server_generated_tokens_total", "n0-0", "policy"] == 900
    assert seen["areal_server_first_token_seconds_total", "n0-0", "policy"] == 1.5
    assert seen["areal_server_swap_seconds_total", "n0-0", "policy"] == 0.25
    assert ("areal_server_weights_step", "n0-1", "grader") not in seen


def test_a_steps_numbers_have_base_units_and_parts_become_labels() -> None:
    """``time_train_s`` is seconds, and every workflow's reward one series of one name."""
    seen = {(one.name, *one.labels.items()): one.value for one in step_samples(LINE)}
    assert seen == {
        ("areal_step_reward_mean",): 0.5,
        ("areal_step_train_seconds",): 2.0,
        ("areal_step_groups",): 16,
        ("areal_step_reward_by_workflow", ("workflow", "gsm8k")): 0.4,
        ("areal_step_groups_by_workflow", ("workflow", "gsm8k")): 16,
        ("areal_step_staleness_tokens_by_age", ("age", "1")): 300,
        ("areal_step_reward_by_age", ("age", "1")): 0.6,
        ("areal_step_info_by_key", ("key", "turns")): 2.0,
    }


def test_what_is_no_number_is_left_out() -> None:
    """A report of an older or newer process costs nothing but the numbers it lacks."""
    assert list(samples("trainer", {"step": "four", "last_step": None})) == []
    assert list(samples("node", {"servers": "none"})) == []
    assert list(samples("broker", {"step": 4})) == []


@pytest.mark.anyio
async def test_a_scrape_says_what_the_report_says_now_and_the_target_goes_with_the_process(tmp_path: Path) -> None:
    """Over real HTTP, in the form that Prometheus reads."""
    report = {"step": 4, "last_step": LINE}
    settings = _settings(tmp_path, prometheus=True)
    place = tmp_path / "prometheus" / "seen-trainer-0.json"
    async with exporting(settings, tmp_path, role="trainer", report=lambda: report), httpx.AsyncClient() as client:
        (group,) = json.loads(place.read_text())
        seen = {name: value for name, value in group["labels"].items() if not name.startswith("__")}
        assert seen == {"run": "seen", "role": "trainer", "instance": "0"}
        url = f"http://{group['targets'][0]}/metrics"
        before = _scraped((await client.get(url)).text)
        report["step"] = 5
        after = _scraped((await client.get(url)).text)
    assert (before["areal_step"], after["areal_step"]) == (4, 5)
    assert after["areal_step_reward_mean"] == 0.5
    assert after["areal_disk_free_bytes"] > 0
    assert after["process_cpu_seconds_total"] > 0
    assert not place.exists()


@pytest.mark.anyio
async def test_what_a_killed_process_has_left_goes_with_the_next_start_and_what_others_have_stays(
    tmp_path: Path,
) -> None:
    """Else it would be down for ever: the run of a killed process may never be started again."""
    folder = tmp_path / "prometheus"
    exports = """
import anyio, signal, os, sys
from pathlib import Path
from areal_async.telemetry.exporters.prometheus import HOST, PID, exporting, write_target
from areal_async.config.settings import MetricsSettings, RunSettings, Settings

async def export(folder):
    run = RunSettings(name="killed", directory=folder)
    async with exporting(Settings(run=run, metrics=MetricsSettings(prometheus=True)), folder, role="node", report=dict):
        os.kill(os.getpid(), signal.SIGKILL)

anyio.run(export, Path(sys.argv[1]))
"""
    killed = await anyio.run_process([sys.executable, "-c", exports, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (dead,) = folder.glob("*.json")
    here, own = socket.gethostname(), _own_labels()[NAMESPACE]
    others = {
        "lives": (here, own, os.getpid()), "elsewhere": ("other", own, 1 << 30), "container": (here, "1", 1 << 30)
    }  # fmt: skip
    for name, (host, namespace, pid) in others.items():
        write_target(folder / f"{name}.json", "a:1", labels={HOST: host, NAMESPACE: namespace, PID: str(pid)})
    (folder / "mine.json").write_text('[{"targets": ["b:1"], "labels": {"team": "x"}}]')
    (folder / "none.json").write_text("{")

    async with exporting(_settings(tmp_path, prometheus=True), tmp_path, role="trainer", report=dict):
        left = {path.stem for path in folder.glob("*.json")}

    assert dead.stem == "killed-node-0"
    assert left == {"lives", "elsewhere", "container", "mine", "none", "seen-trainer-0"}


@pytest.mark.anyio
async def test_nothing_is_served_unless_asked_for(tmp_path: Path) -> None:
    """Most runs are not scraped."""
    async with exporting(_settings(tmp_path), tmp_path, role="trainer", report=dict):
        assert not (tmp_path / "prometheus").exists()


@pytest.mark.anyio
async def test_an_address_of_another_host_is_said_in_one_sentence(tmp_path: Path) -> None:
    """Not a traceback from a process that is started again and again."""
    settings = _settings(tmp_path, prometheus=True, prometheus_host="192.0.2.1")
    with pytest.raises(UserError, match=r"metrics.prometheus_host: got 192\.0\.2\.1, need an address of this host"):
        async with exporting(settings, tmp_path, role="trainer", report=dict):
            pass


def test_every_number_that_the_alerts_and_the_dashboard_name_is_exported() -> None:
    """A renamed metric must not leave a panel empty or an alert silent."""
    exported = {field.name for fields in (ARM, CONTROLLER, NODE, SERVER, TRAINER) for field in fields}
    exported |= {sample.name for sample in step_samples(dict.fromkeys(STEP, 1.0) | {"reward/gsm8k": 1.0})}
    exported |= {"areal_server_fenced", "areal_server_weights_step", "areal_disk_free_bytes", "areal_disk_size_bytes"}
    exported |= {"up", "process_resident_memory_bytes", "process_cpu_seconds_total"}
    expressions = [*_alerts(), *_panels()]
    assert len(expressions) > 25
    for expression in expressions:
        named = set(_names(promql_parser.parse(expression)))
        assert named, expression
        assert named <= exported, expression


def _scraped(text: str) -> dict[str, float]:
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def _alerts() -> Iterator[str]:
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def _panels() -> Iterator[str]:
    for panel in json.loads((MONITORING / "grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$run", ".*")


def _names(node: Any) -> Iterator[str]:
    """Walk an expression for the series it selects."""
    match node:
        case promql_parser.VectorSelector():
            yield node.name
        case promql_parser.MatrixSelector():
            yield from _names(node.vector_selector)
        case promql_parser.BinaryExpr():
            yield from _names(node.lhs)
            yield from _names(node.rhs)
        case promql_parser.Call():
            for argument in node.args:
                yield from _names(argument)
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr():
            yield from _names(node.expr)
