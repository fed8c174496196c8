"""The ``metrics`` section: where numbers go besides the run directory's own files."""

from areal_async.section import Section


class MetricsSettings(Section):
    """Exports of what the run measures."""

    tensorboard: bool = True
    """Write every step's and evaluation's numbers to ``<run directory>/tensorboard`` as well."""
    wandb_project: str | None = None
    """Send them to this project of Weights & Biases too (extra ``wandb``); ``None`` sends nothing."""
    prometheus: bool = False
    """Every process serves ``/metrics`` on a free port; ``<run.directory>/prometheus/*.json`` tell Prometheus where."""
    prometheus_host: str = "127.0.0.1"
    """Address those ports are opened at: 127.0.0.1 for scrapes from the same host only."""
