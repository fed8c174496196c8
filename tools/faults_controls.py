"""Negative controls: the program is sabotaged, and the checker must see what that loses or trains twice.

The sabotage is a ``sitecustomize`` module on the path of the run's processes alone; the program has no switch for it.
"""

from pathlib import Path

from tools.faults_cases import Case, row
from tools.faults_run import ENDLESS, REPOSITORY

MAX_STALENESS = 8
"""Staleness bound at which groups may be trained again, and lost credits do not bring the run to a halt."""
FORGETFUL = """
    from areal_async.protocol.journal import Journal
    from areal_async.trainer.batch.planner import BatchPlanner

    hold = BatchPlanner.hold
    BatchPlanner.hold = lambda self, cut: hold(self, cut) if cut.lineage == self.lineage else None
    Journal.steps_to_replay = lambda self: []
"""
WITHOUT_LEDGER = (
    '''"""A trainer that remembers nothing of what its checkpoint contains."""
import sys

if "trainer" in sys.orig_argv:'''
    + FORGETFUL
    + """
    Journal.add_outcome = lambda self, outcome: False
"""
)
ACK_FIRST = (
    '''"""A trainer that acks what it cuts, and replays nothing."""
import sys

if "trainer" in sys.orig_argv:'''
    + FORGETFUL
    + """
    from areal_async.trainer.batch.feed import BatchFeed

    make = BatchFeed.__init__

    def make_with_early_acks(self, bus, settings, lineage, journal):
        make(self, bus, settings, lineage, journal)
        write = lineage.write_cut

        async def write_and_ack(entry):
            sequence = await write(entry)
            await bus.settle(self.planner.messages.release([group.group_id for group in entry.groups]))
            return sequence

        lineage.write_cut = write_and_ack

    BatchFeed.__init__ = make_with_early_acks
"""
)


def _run_sabotaged(case: Case, sabotage: str, *, faults: str) -> None:
    folder = case.directory / "sabotage"
    folder.mkdir()
    Path(folder, "sitecustomize.py").write_text(sabotage)
    run = case.new_run(
        faults=faults,
        environment={"PYTHONPATH": f"{folder}:{REPOSITORY}"},
        run__steps=ENDLESS,
        rollout__max_staleness=MAX_STALENESS,
    )
    run.start()
    run.wait_until(lambda: bool(run.events("trainer", "trainer.restored")[1:]), "the second trainer")
    run.wait_for_step(run.events("trainer", "trainer.restored")[-1]["step"] + 4)
    run.stop()


@row("N2", "negative control: no ledger", must_show="twice", is_quick=True)
def without_ledger(case: Case) -> None:
    _run_sabotaged(case, WITHOUT_LEDGER, faults="trainer.before_acks:2:kill")


@row("N3", "negative control: acks before the checkpoint", must_show="lost")
def acks_first(case: Case) -> None:
    _run_sabotaged(case, ACK_FIRST, faults="trainer.before_checkpoint:2:kill")
