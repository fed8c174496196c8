"""``eval`` by itself traces its rows as a live run's evaluation does, at a collector or in the run's own files."""

import json
from pathlib import Path

import pytest

from areal_async.config.sources import load_settings
from areal_async.launch.run_directory import RunDirectory
from tests.collector import collecting
from tests.e2e.test_run import REPOSITORY, said
from tests.unit.inference.embedded_engine import Server

MODEL = REPOSITORY / "configs" / "models" / "tiny"
CONFIG = REPOSITORY / "configs" / "gsm8k_cpu.yaml"
SHORT = ["--rollout.sampling.max_new_tokens", "4"]

pytestmark = pytest.mark.timeout(180)


def _eval(*words: str) -> str:
    """Return what it says of what it does."""
    ended = said("eval", *words, "--limit", "2", *SHORT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return str(ended.stderr)


def _eval_at(engine: Server, traces: str) -> str:
    words = ["--config", str(CONFIG), "--server", str(engine.http.base_url), "--metrics.traces", traces]
    return _eval(str(REPOSITORY / "workflows" / "gsm8k.py"), *words)


def test_each_row_of_a_model_that_is_evaluated_is_a_trace_at_the_collector(engine: Server) -> None:
    with collecting() as collector:
        for _ in range(2):
            _eval_at(engine, collector.url)

    traces = list(collector.traces().values())
    rows = [next(span for span in spans if not span.parent) for spans in traces]
    assert {row.service for row in rows} == {"areal-eval"}
    assert {row.name for row in rows} == {"invoke_workflow gsm8k"}
    asked = {(row.attributes["areal.eval_id"], row.attributes["areal.eval.index"]) for row in rows}
    assert len(asked) == 4, "two evaluations of two rows"
    for row, spans in zip(rows, traces, strict=True):
        (completion,) = (span for span in spans if span.name.startswith("text_completion"))
        assert completion.parent == row.id
        ((happened, said),) = row.events
        assert (happened, said["gen_ai.evaluation.score.label"]) == ("gen_ai.evaluation.result", "scored")


def test_the_rows_of_a_run_that_is_over_are_traced_in_its_files(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "over")
    words = ["--run.name", "over", "--run.directory", str(tmp_path), "--metrics.traces", "file"]
    directory.write_settings(load_settings(CONFIG, words))
    (directory.path / "model").symlink_to(MODEL)

    _eval("--run", str(directory.path))

    lines = [json.loads(line) for line in (directory.path / "traces" / "eval-0.jsonl").read_text().splitlines()]
    spans = [span for line in lines for one in line["resourceSpans"][0]["scopeSpans"] for span in one["spans"]]
    assert len([span for span in spans if span["name"] == "invoke_workflow gsm8k"]) == 2


def test_a_model_without_a_run_has_no_place_for_traces_in_files(engine: Server) -> None:
    assert "metrics.traces: got file without a run" in _eval_at(engine, "file")
