"""What became of every trajectory whose publish was acknowledged, read from what a run has left."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pyarrow.parquet as pq

from areal_async.bus import Bus, EmbeddedBroker, Role, open_bus
from areal_async.errors import WireError
from areal_async.journal import Journal
from areal_async.receipts import read_receipts
from areal_async.settings import Settings
from areal_async.staleness import age_at
from areal_async.types import Cut, Outcome, OutcomeKind, Version
from areal_async.wire import decode, decode_headers, decode_trajectory

END_REASON = "the run ended first"
"""Of outcomes that the controller writes for whatever nobody settled: no excuse for a message that is gone."""


@dataclass(slots=True)
class Accounts:
    """Of trajectories, by sample uid."""

    acked: int = 0
    trained: int = 0
    stored: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    over_age: list[str] = field(default_factory=list)


async def account(settings: Settings, bus: Bus) -> Accounts:
    """Read the books of a run at rest."""
    names, journal, slot_outcomes = bus.names, Journal(), dict[str, OutcomeKind]()
    for message in await bus.read_log(names.outcomes_stream, names.log):
        if message.subject == names.cuts:
            journal.add_cut(decode(message.data, Cut), sequence=message.sequence)
        else:
            outcome = decode(message.data, Outcome)
            journal.add_outcome(outcome)
            if outcome.sample_uid:
                slot_outcomes[outcome.sample_uid] = outcome.kind
    stored: set[str] = set()
    async for message in bus.find_messages(names.trajectories_stream, f"areal.{names.run}.trajectories.>"):
        try:
            found = decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data))
            for slot in found.slots:
                decode_trajectory(message.data, slot)
                stored.add(slot.sample_uid)
        except WireError:
            continue  # what cannot be used is not there
    return _judge(settings, journal, slot_outcomes, stored)


def account_at_rest(settings: Settings) -> Accounts:
    """Start the run's embedded broker again and read the books."""

    async def read() -> Accounts:
        broker = EmbeddedBroker(settings)
        await broker.start()
        try:
            async with open_bus(
                broker.url, names=settings.names, role=Role.OPERATOR, credentials=broker.credentials(Role.OPERATOR)
            ) as bus:
                return await account(settings, bus)
        finally:
            await broker.aclose()

    return anyio.run(read)


def _judge(settings: Settings, journal: Journal, slot_outcomes: dict[str, OutcomeKind], stored: set[str]) -> Accounts:
    accounts = Accounts()
    archive = _archive(settings.run_directory)
    trained = {row["sample_uid"] for row in archive}
    slots = Counter((row["group_id"], row["sibling"]) for row in archive)
    accounts.twice = [f"{group}.{sibling}" for (group, sibling), count in slots.items() if count > 1]
    branches = {int(lineage): step for lineage, step in journal.branches.items()}
    for row in archive:
        versions = {Version.unpack(packed) for one in row["versions"] for packed in one if packed >= 0}
        ages = [age_at(step=row["step"], version=one, lineage=row["lineage"], branches=branches) for one in versions]
        if max(ages, default=0) > settings.rollout.max_staleness:
            accounts.over_age.append(row["sample_uid"])
    in_cut = {item.slot.sample_uid for cut in journal.cuts.values() for group in cut.groups for item in group.slots}
    for produced in read_receipts(settings.run_directory).values():
        for receipt in produced.receipts:
            outcome = journal.outcomes.get(receipt.group_id)
            for slot in receipt.slots:
                uid = slot.sample_uid
                accounts.acked += 1
                if uid in trained:
                    accounts.trained += 1
                elif uid in slot_outcomes:
                    accounts.dropped[slot_outcomes[uid].value] += 1
                elif uid in stored and (outcome is None or outcome.reason == END_REASON):
                    accounts.stored += 1
                elif outcome is not None and outcome.kind is OutcomeKind.TRAINED and uid not in in_cut:
                    accounts.dropped["unused"] += 1
                elif outcome is not None and outcome.kind is not OutcomeKind.TRAINED and outcome.reason != END_REASON:
                    accounts.dropped[outcome.kind.value] += 1
                else:
                    accounts.lost.append(uid)
    return accounts


def _archive(directory: Path) -> list[dict[str, Any]]:
    columns = ["step", "lineage", "group_id", "sibling", "sample_uid", "versions"]
    return [
        row
        for path in sorted(directory.glob("trajectories/*.parquet"))
        for row in pq.read_table(path, columns=columns).to_pylist()
    ]
