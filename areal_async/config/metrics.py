"""The ``metrics`` section: where numbers and traces go besides the run directory's own files."""

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from areal_async.config.section import Section

TO_FILES = "file"
"""``metrics.traces`` that need no collector."""


class MetricsSettings(Section):
    """Exports of what the run measures."""

    tensorboard: bool = True
    """Write every step's and evaluation's numbers to ``<run directory>/tensorboard`` as well (extra
    ``tensorboard``; without it none are written, and that is said once)."""
    wandb_project: str | None = None
    """Send them to this project of Weights & Biases too (extra ``wandb``); ``None`` sends nothing."""
    prometheus: bool = False
    """Every process serves ``/metrics`` on a free port; ``<run.directory>/prometheus/*.json`` tell Prometheus where."""
    prometheus_host: str = "127.0.0.1"
    """Address those ports are opened at: 127.0.0.1 for scrapes from the same host only."""
    traces: str | None = None
    """Send OpenTelemetry traces of groups, held-out rows and training steps to this OTLP/HTTP collector, as
    ``http://host:4318`` (extra ``traces``); ``file`` writes them to ``<run directory>/traces`` instead; ``None``
    records none."""
    traces_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of groups, and of held-out rows, that are traced, chosen by their ids, alike in every process; training
    steps all are."""
    traces_texts: bool = False
    """Let reasons, which may quote prompts and answers, into traces."""
    traces_key: str = ""
    """Tells this run's traces from those of an earlier one of its name; made when a run is started anew."""

    @field_validator("traces")
    @classmethod
    def _traces(cls, traces: str | None) -> str | None:
        if traces is None or traces == TO_FILES or _is_address(traces):
            return traces
        raise ValueError(
            f"got {traces!r}, need {TO_FILES} or the http(s)://host:port of a collector of OTLP over HTTP, without a "
            "query"
        )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not set(url) & {*"?#"}
    except ValueError:  # no port is that, or no address
        return False
