"""The metrics of each role, as named numbers with units. Pure; dashboards rely on the names, which are stable.

Names follow Prometheus: base units (seconds, bytes), ``_total`` on what only grows within one life of a process.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeGuard

from areal_async.protocol.types import Version
from areal_async.telemetry.reports import servers_in

GAUGE, COUNTER = "gauge", "counter"


class MetricSample(NamedTuple):
    """One number of one role, with its labels."""

    name: str
    help: str
    value: float
    labels: dict[str, str] = {}


class Field(NamedTuple):
    """A key of a report, and the number it becomes."""

    key: str
    name: str
    help: str
    labels: dict[str, str] = {}


CONTROLLER = (
    Field("admitted", "areal_groups_admitted_total", "Groups admitted since the run began."),
    Field("settled", "areal_groups_settled", "Groups settled in the newest lineage."),
    Field("in_flight", "areal_groups_in_flight", "Groups admitted and not settled."),
    Field("credits", "areal_credits", "Groups that may still be admitted."),
    Field("num_held_back", "areal_credits_held_back", "Groups that are admitted later, so that they are younger."),
    Field("predicted_step_s", "areal_pacing_step_seconds", "Time that the next step is expected to take."),
    Field("step_error_s", "areal_pacing_step_error_seconds", "How much longer the last one took than expected."),
    Field("predicted_duration_s", "areal_pacing_duration_seconds", "Time within which 9 of 10 groups should be whole."),
    Field("late_share", "areal_pacing_late_share", "Share of the last batch that took longer: 0.1 is expected."),
    Field("untrained", "areal_groups_untrained", "Groups that have ended untrained since the last cut."),
    Field("is_paused", "areal_run_paused", "1 while an operator has paused the run."),
    Field("quiet_s", "areal_quiet_seconds", "Time since anything in the run made progress."),
    Field("num_dead_letters", "areal_dead_letters_total", "Messages that this process could not use."),
)
ARM = (
    Field("difference", "areal_arm_difference", "Mean reward of an arm less that of the newest weights."),
    Field("low", "areal_arm_difference_low", "Lower end of its confidence sequence."),
    Field("high", "areal_arm_difference_high", "Upper end of its confidence sequence."),
    Field("num_asked", "areal_arm_prompts_total", "Prompts that an arm was asked."),
    Field("num_pairs", "areal_arm_pairs_total", "Prompts to which both sides have a reward."),
    Field("num_failed", "areal_arm_failed_total", "Prompts to which a side has none."),
)
NODE = (
    Field("num_groups_running", "areal_groups_running", "Groups that this node works on."),
    Field("num_trajectories_running", "areal_trajectories_running", "Workflows running."),
    Field(
        "num_groups_waiting_for_stream",
        "areal_groups_waiting_for_stream",
        "Finished groups that wait for room in the trajectory stream.",
    ),
    Field("num_requests_waiting", "areal_requests_waiting", "Completions that wait for a server."),
    *(
        Field(f"num_{outcome}", "areal_trajectories_total", "Trajectories stored by this node.", {"outcome": outcome})
        for outcome in ("scored", "failed", "rejected")
    ),
    Field("num_generated_tokens", "areal_generated_tokens_total", "Tokens its servers have generated."),
    Field("loop_lag_p99_s", "areal_event_loop_lag_p99_seconds", "99th percentile of the event loop's lag."),
    Field("loop_lag_max_s", "areal_event_loop_lag_max_seconds", "Largest lag of the event loop."),
    Field("num_dead_letters", "areal_dead_letters_total", "Messages that this process could not use."),
)
SERVER = (
    Field("num_requests", "areal_server_requests", "Completions that a server works on."),
    Field("limit", "areal_server_requests_limit", "Completions that it is given at the most."),
    Field("outstanding_tokens", "areal_server_outstanding_tokens", "Tokens that its completions may take yet."),
    Field("num_generated_tokens", "areal_server_generated_tokens_total", "Tokens it has generated."),
    Field("num_prompt_tokens", "areal_server_prompt_tokens_total", "Tokens of the prompts that it has answered."),
    Field("num_cached_tokens", "areal_server_cached_tokens_total", "Those of them that it had in its cache."),
    Field("num_first_tokens", "areal_server_first_tokens_total", "Streams that have given a token."),
    Field(
        "first_token_total_s",
        "areal_server_first_token_seconds_total",
        "Time from their requests to these first tokens.",
    ),
    Field("num_swaps", "areal_server_swaps_total", "Weights versions that it was given."),
    Field("swap_total_s", "areal_server_swap_seconds_total", "Time for which these have paused it."),
)
TRAINER = (
    Field("step", "areal_step", "Training steps done."),
    Field("num_dead_letters", "areal_dead_letters_total", "Messages that this process could not use."),
)
REQUESTS = Field(
    "requests",
    "areal_serve_requests_total",
    "Requests, by what became of them.",
    {"arm": "ARM", "version": "VERSION", "outcome": "OUTCOME"},
)
TOKENS = Field(
    "tokens", "areal_serve_tokens_total", "Tokens of answers that were given.", {"arm": "ARM", "version": "VERSION"}
)
SERVE = (
    REQUESTS,
    TOKENS,
    Field("num_answers", "areal_serve_answers", "Answers that are generated or wait."),
    Field("num_feedback", "areal_serve_feedback_total", "Feedback taken."),
    Field("num_left_out", "areal_serve_records_left_out_total", "Records that could not be written."),
    Field("num_mixed", "areal_serve_mixed_answers_total", "Answers of more than one version: a broken promise."),
)
STEP = {
    "reward_mean": "Mean reward of the newest step's trajectories.",
    "reward_std": "Standard deviation of their rewards.",
    "num_groups": "Groups in the newest step.",
    "groups_all_equal": "Groups of it whose rewards are all equal: they teach nothing.",
    "num_trajectories": "Trajectories in the newest step.",
    "num_tokens": "Trained tokens of the newest step.",
    "output_tokens_mean": "Mean length of its answers, in tokens.",
    "prompt_tokens": "Tokens of the prompts that servers were sent for it.",
    "cached_tokens": "Those of them that servers had in their caches.",
    "truncated_share": "Share of its answers that were cut off.",
    "staleness_mean": "Mean age of its tokens, in versions.",
    "staleness_max": "Largest age of its tokens, in versions.",
    "temperature_mean": "Mean temperature that its tokens were sampled at.",
    "steered_tokens": "Trained tokens that a grammar, a bias or a penalty had a say in.",
    "loss": "Loss of the newest step.",
    "grad_norm": "Gradient norm before clipping.",
    "entropy_mean": "Mean entropy of the policy, in nats.",
    "logprob_gap_mean": "Mean |trainer - server| logprob over tokens of the step's start version.",
    "logprob_gap_max": "Largest |trainer - server| logprob over those.",
    "ratio_max_deviation": "Largest |importance ratio - 1| over those.",
    "clip_fraction": "Share of tokens at which the clip, a mask or the bound on a ratio acted.",
    "kl_mean": "Estimated distance to the reference model.",
    "lr": "Learning rate.",
    "num_skipped": "Updates left out of the newest step because they were not finite.",
    "dropped_stale": "Groups dropped as too old since the step before.",
    "failed": "Groups that failed since the step before.",
    "time_step_s": "Duration of the newest step.",
    "time_wait_data_s": "Time of it spent waiting for data.",
    "time_train_s": "Time of it spent training.",
    "time_weights_s": "Time of it spent publishing weights.",
}
"""Keys of a line of ``metrics.jsonl``; whatever else it holds is exported too, under the same rule of names."""
LABELS = {
    "reward": "workflow", "groups": "workflow", "staleness_tokens": "age", "reward_at_age": "age", "info": "key",
}  # fmt: skip
"""First part of a key with a slash -> what its second part is; ``key`` for one that is not here."""
NOT_EXPORTED = {"step", "weights_version"}
_UNFIT = re.compile(r"[^a-zA-Z0-9_]")


def kind_of(name: str) -> str:
    """Return the kind of a metric: its name tells, as Prometheus's do."""
    return COUNTER if name.endswith("_total") else GAUGE


def samples(role: str, report: Mapping[str, Any]) -> Iterator[MetricSample]:
    """Yield the numbers of one report of a role (``controller``, ``node``, ``trainer``, ``serve``)."""
    match role:
        case "controller":
            yield from _read(CONTROLLER, report)
            for name, arm in (report.get("arms") or {}).items():
                yield from (one._replace(labels={"arm": name}) for one in _read(ARM, arm))
        case "node":
            yield from _read(NODE, report)
            for server_id, server in servers_in(report).items():
                yield from _server(server_id, server)
        case "trainer":
            yield from _read(TRAINER, report)
            yield from step_samples(report.get("last_step") or {})
        case "serve":
            yield from _read(SERVE, report)
            yield from _served(report)
            for server_id, server in servers_in(report).items():
                yield from _server(server_id, server)


def step_samples(line: Mapping[str, Any]) -> Iterator[MetricSample]:
    """Yield the numbers of a line of ``metrics.jsonl``; the second part of ``reward/<workflow>`` becomes a label."""
    for key, value in line.items():
        if key in NOT_EXPORTED or not _is_number(value):
            continue
        name, _, part = key.partition("/")
        if not part:
            text = STEP.get(key, f"{key} of the newest step.")
            yield MetricSample(f"areal_step_{_with_unit(name)}", text, float(value))
            continue
        by = LABELS.get(name, "key")
        text = f"{name} of the newest step, by {by}."
        whole = _with_unit(name.removesuffix(f"_at_{by}"))
        yield MetricSample(f"areal_step_{whole}_by_{by}", text, float(value), {by: part})


def _with_unit(name: str) -> str:
    """``time_train_s`` -> ``train_seconds``, ``num_groups`` -> ``groups``."""
    name = _UNFIT.sub("_", name)
    if name.endswith("_s"):
        return name.removeprefix("time_").removesuffix("_s") + "_seconds"
    return name.removeprefix("num_")


def _server(server_id: str, server: Mapping[str, Any]) -> Iterator[MetricSample]:
    labels = {"server": server_id, "policy": str(server.get("frozen") or "policy")}
    for one in _read(SERVER, server):
        yield one._replace(labels=labels)
    fence = str(server.get("fence") or "")
    yield MetricSample("areal_server_fenced", "1 while a server is kept out of use.", float(bool(fence)), labels)
    with suppress(ValueError):  # it runs none yet
        step = Version.parse(str(server.get("version"))).step
        yield MetricSample("areal_server_weights_step", "Step of the weights it runs.", step, labels)


def _served(report: Mapping[str, Any]) -> Iterator[MetricSample]:
    """Yield the counts of each arm and version: their keys are the labels' values."""
    for one in (REQUESTS, TOKENS):
        for values, count in report[one.key].items():
            yield MetricSample(one.name, one.help, count, dict(zip(one.labels, values, strict=True)))


def _read(fields: tuple[Field, ...], report: Mapping[str, Any]) -> Iterator[MetricSample]:
    for field in fields:
        value = report.get(field.key)
        if _is_number(value):
            yield MetricSample(field.name, field.help, float(value), field.labels)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float)
