"""One examination, from a run directory to a diagnosis. A live run is asked at its broker, as the operator; a dead
one's store is copied and the copy asked. Neither is changed.
"""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio.to_thread

from areal_async.algorithms.advantages import advantage_rule
from areal_async.bus import Bus, HeldError, Role, copied_broker, open_run_bus
from areal_async.config.settings import Settings, TaskSettings
from areal_async.data.rows import load_rows
from areal_async.doctor.audit.coverage import admitted_groups, rule_covered
from areal_async.doctor.audit.durable import rule_durable, rule_once
from areal_async.doctor.audit.gather import gather
from areal_async.doctor.audit.reconciliation import Reconciliation
from areal_async.doctor.audit.report import Diagnosis, ViolationKind, num_ids
from areal_async.doctor.audit.run_record import Baseline, Rules, RunRecord, TaskRules
from areal_async.doctor.audit.tokens import rule_fresh, rule_versioned, rule_whole
from areal_async.errors import UserError

CONNECT_DEADLINE_S = 5.0


async def examine(settings: Settings, run_directory: Path, bus_url: str) -> Diagnosis:
    """Judge every promise that a run's remains can speak of.

    Args:
        bus_url: where the run's broker is, or was.

    Raises:
        UserError: there is no store, or a process holds it whose broker does not answer.
    """
    rules = await anyio.to_thread.run_sync(read_rules, settings)
    async with _open(settings, run_directory, bus_url) as (bus, notes):
        evidence = await gather(bus, run_directory, rules, is_live=notes is None)
    evidence.notes += notes or []
    return diagnose(settings.run.name, evidence)


def diagnose(run: str, evidence: RunRecord) -> Diagnosis:
    """Judge the evidence. Pure."""
    audit = Reconciliation(evidence)
    admitted = admitted_groups(audit)
    rulings = [
        rule_durable(audit, admitted),
        rule_once(audit),
        rule_fresh(audit),
        rule_whole(audit),
        rule_versioned(audit),
        rule_covered(audit, admitted),
    ]
    notes = evidence.absent_streams + evidence.unreadable_files + evidence.notes
    notes += [f"stored message without readable headers: {reason}" for reason in evidence.unreadable_messages]
    return Diagnosis(
        run=run,
        is_live=evidence.is_live,
        is_finished=evidence.is_finished,
        checkpoint=evidence.ledger.version if evidence.ledger else "",
        groups={
            "admitted": evidence.admitted.total,
            "settled": len(audit.journal.outcomes),
            **audit.num_groups_by_fate(),
            **num_ids(rulings, ViolationKind.HOLE),
        },
        slots={
            "acknowledged": len(audit.received),
            "in the broker": len(audit.stored),
            **dict(Counter(fate.kind for fate in audit.fates.values()).most_common()),
            **num_ids(rulings, ViolationKind.LOST, ViolationKind.TWICE, ViolationKind.OVER_AGE),
        },
        notes=notes,
        rulings=rulings,
    )


def read_rules(settings: Settings) -> Rules:
    """Take from the settings what the promises speak of, and count the rows of the data."""
    tasks: tuple[TaskRules, ...] = ()
    why_no_rows = ""
    try:
        tasks = tuple(_task_rules(settings, task) for task in settings.tasks)
    except UserError as exc:
        why_no_rows = str(exc)
    rollout = settings.rollout
    every = [settings.rollout_of(task.name) for task in settings.tasks] or [rollout]
    return Rules(
        group_size=min(one.group_size for one in every),
        min_group_size=min(one.min_group_size for one in every),
        max_staleness=rollout.max_staleness,
        max_attempts=rollout.max_attempts,
        max_groups_in_flight=rollout.max_groups_in_flight,
        advantages=baseline_of(settings),
        seed=settings.run.seed,
        tasks=tasks,
        curriculum=None if rollout.curriculum.name == "none" else rollout.curriculum,
        why_no_rows=why_no_rows or "the settings name no task",
    )


def baseline_of(settings: Settings) -> Baseline:
    """Say what rewards alone do not: who else makes the advantages, and where their mean is 0 all the same."""
    algorithm, rule = settings.algorithm, advantage_rule(settings)
    if algorithm.calls:
        made_by = f"{', '.join(algorithm.calls)} and not by rewards alone"
        return Baseline(rule=rule, made_by=made_by, is_unknown=True)
    if algorithm.advantage_baseline == "critic":
        is_whitened = algorithm.advantage_std == "batch"
        return Baseline(rule=rule, made_by="a critic", centred_in="step" if is_whitened else "")
    if not algorithm.has_kl_reward:
        return Baseline(rule=rule)
    made_by = "rewards less their distance to a reference"
    if algorithm.advantage_baseline == "none":
        return Baseline(rule=rule, made_by=made_by, centred_in="step" if algorithm.advantage_std == "batch" else "")
    # Whitened by sampled tokens, of which some may be masked: no sum that the archive could be held against.
    return Baseline(rule=rule, made_by=made_by, centred_in="" if algorithm.advantage_std == "batch" else "group")


def _task_rules(settings: Settings, task: TaskSettings) -> TaskRules:
    rollout = settings.rollout_of(task.name)
    return TaskRules(
        num_rows=len(load_rows(settings.dataset_of(task))),
        ratio=task.ratio,
        group_size=rollout.group_size,
        min_group_size=rollout.min_group_size,
    )


@asynccontextmanager
async def _open(settings: Settings, run_directory: Path, bus_url: str) -> AsyncIterator[tuple[Bus, list[str] | None]]:
    """Connect to the run's broker, with ``None``, or to one with a copy of its store, with what is to be said of it."""
    url, credentials = bus_url, None
    notes, holder = None, "its broker is not embedded"
    async with AsyncExitStack() as stack:
        if settings.bus.url == "embedded":
            try:
                broker, notes = await stack.enter_async_context(copied_broker(settings, run_directory))
            except HeldError as exc:
                holder = str(exc)
            else:
                url, credentials = broker.url, broker.credentials(Role.OPERATOR)
        bus = open_run_bus(
            settings,
            run_directory,
            url,
            Role.OPERATOR,
            instance="doctor",
            credentials=credentials,
            connect_deadline_s=CONNECT_DEADLINE_S,
        )
        try:
            connected = await stack.enter_async_context(bus)
        except UserError as exc:
            raise UserError(f"run {settings.run.name}: {holder}, and: {exc}") from exc
        yield connected, notes
