"""Observation of one process: logs, waits, traces, and the exporters of metrics."""
