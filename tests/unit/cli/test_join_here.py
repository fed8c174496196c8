"""What a host that joins a run may have otherwise than the run, and what it must have."""

import argparse
import sys
from fnmatch import fnmatchcase

import pytest

from areal_async.cli import join
from areal_async.cli.starting.checks import check_node
from areal_async.config.settings import InferenceSettings, MetricsSettings, Settings
from areal_async.errors import UserError


@pytest.mark.parametrize("word", ["--metrics.traces_ratio", "--metrics.traces_key=k", "--inferences.x", "--run.steps"])
def test_what_all_hosts_have_alike_is_refused_by_name(word: str) -> None:
    given = argparse.Namespace(
        run="r", run_directory=None, credentials=None, ca=None, directory=None, join="nats://h:1",
        allow_other_files=False, node_id=None,
    )  # fmt: skip

    with pytest.raises(UserError, match=f"{word.partition('=')[0]}: a node has the settings of its run, all but "):
        join.run(given, ["--metrics.traces=file", "--inference.num_servers", "2", word, "1"])


def test_a_host_without_the_extra_for_traces_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    # Not every machine reaches a hub.
    monkeypatch.setattr("areal_async.cli.starting.checks.fetch", lambda *_, **__: None)
    settings = Settings().model_copy(update={"metrics": MetricsSettings(traces="http://h:4318")})

    with pytest.raises(UserError, match=r"metrics.traces: got 'http://h:4318', need the packages .*, or set it to fil"):
        check_node(settings)


def test_a_host_that_cannot_be_scraped_at_the_address_is_refused_and_may_have_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("areal_async.cli.starting.checks.fetch", lambda *_, **__: None)
    metrics = MetricsSettings(prometheus=True, prometheus_host="192.0.2.1")
    settings = Settings().model_copy(update={"metrics": metrics})

    with pytest.raises(UserError, match=r"metrics.prometheus_host: got 192\.0\.2\.1, need an address of this host"):
        check_node(settings)
    assert any(fnmatchcase("--metrics.prometheus_host", own) for own in join.OWN)


def test_a_host_whose_engine_has_not_the_parser_of_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.cli.starting.checks.fetch", lambda *_, **__: None)
    settings = Settings(inference=InferenceSettings(backend="embedded", tool_call_parser="qwen25"))

    with pytest.raises(UserError, match="inference.tool_call_parser: got qwen25, but the embedded engine has no"):
        check_node(settings)
