"""Which version is evaluated when: each that is due, what an operator asks for, and the last one, which ends the run.

The first evaluation speaks of version 0 alone: the trainer announces the next one when it is over, and trains the first
step meanwhile. Until then one group less is admitted than two steps are trained of, so that no second one waits for it.
"""

import math
from contextlib import AbstractContextManager

import anyio
import msgspec

from areal_async.bus import Report
from areal_async.config.settings import Settings
from areal_async.controller.accounts import Accounts
from areal_async.controller.admission import has_ended
from areal_async.controller.evaluation import Evaluator
from areal_async.controller.gate import Gate
from areal_async.controller.processes.reports import RunProgress
from areal_async.errors import UserError
from areal_async.protocol.fields import is_version
from areal_async.protocol.types import Version, WeightsVersion
from areal_async.telemetry import wait_graph

SETTLE_POLL_S = 0.5
"""Between two looks whether the checkpoint of a version is there that is to be promoted."""


def newest_due_step(step: int, *, every_steps: int, last_step: int) -> int:
    """Return the newest step up to ``step`` whose version is evaluated: the first, the last, and every few between."""
    if step >= last_step:
        return last_step
    return step - step % every_steps if every_steps else 0


class EvaluationSchedule:
    """The evaluations of one run, one after the other."""

    def __init__(
        self, evaluator: Evaluator | None, settings: Settings, *, accounts: Accounts, progress: RunProgress, gate: Gate
    ) -> None:
        """``evaluator``: None for a run without held-out rows, of which the schedule tells the end alone."""
        self._gate = gate
        self._evaluator = evaluator
        self._accounts = accounts
        self._progress = progress
        self._asked: Version | None = None
        """Version since which an operator wants one evaluation more."""
        self.settings = settings
        """The run's, with what operators have changed."""
        self.newest: WeightsVersion | None = None
        """The version that was announced last."""
        self.is_first_done = evaluator is None

    @property
    def waits_for(self) -> str:
        """What the evaluation that is under way waits for; empty while there is none."""
        return self._evaluator.waits_for if self._evaluator is not None else ""

    async def run(self) -> None:
        """Evaluate what is due and what is asked for, until the final version is done.

        consumes:     versions that the servers hold
        waits for:    the next progress of the run
        produces:     evaluations
        unblocked by: nodes and the trainer
        """
        last_step, evaluated, lineage = self.settings.run.steps, -1, 0
        if self._evaluator is not None:
            await self._gate.resume(await self._evaluator.made())
        while True:
            await self._gate.settle()
            num_seen, held, newest = self._progress.changed.num_rings, self._accounts.held, self.newest
            if held is not None and newest is not None and not (newest.final and held < Version.parse(newest.version)):
                is_over = has_ended(self._accounts, newest, last_step=last_step)
                if is_over and self._evaluator is not None:
                    self._evaluator.end_training()
                if held.lineage != lineage:  # which may have gone back
                    lineage, evaluated = held.lineage, -1
                due = newest_due_step(held.step, every_steps=self.settings.eval.every_steps, last_step=last_step)
                if due > evaluated:
                    evaluated = due
                    counts, evaluator = self._accounts.journal.survives, self._evaluator
                    if evaluator is not None and not await evaluator.is_done(due, counts=counts):
                        await self._evaluate(evaluator, held, due_step=due)
                elif self._asked is not None and self._evaluator is not None:
                    since, self._asked = self._asked, None
                    if all(version < since for version in await self._evaluator.made()):  # none was under way
                        await self._evaluate(self._evaluator, held, due_step=held.step)
                    continue
                if not self.is_first_done:
                    self.is_first_done = True
                    self._progress.announce()
                if is_over:
                    return
            poll_s = SETTLE_POLL_S if self._gate.is_waiting else math.inf
            with self.waiting(wait_graph.CONTROLLER), anyio.move_on_after(poll_s):
                await self._progress.changed.wait(num_seen)

    async def _evaluate(self, evaluator: Evaluator, held: Version, *, due_step: int) -> None:
        with wait_graph.on(wait_graph.evaluation(str(held)), waiter=wait_graph.CONTROLLER):
            await evaluator.evaluate(held, due_step=due_step, on_result=self._progress.announce)
        await self._gate.judge(held)

    async def ask(self, body: Report) -> Report:
        """Answer an operator with an evaluation of what the servers hold now, or have it begin.

        Anyone who asks names the version of the first answer, and asks again until there are records: those of the
        oldest evaluation that began with that version or a newer one. So it does no harm to ask another controller.

        Raises:
            UserError: the run has no held-out rows, or no weights yet; or ``version`` is none.
        """
        held, run = self._accounts.held, self.settings.run.name
        if self._evaluator is None:
            raise UserError(f"run {run}: has no held-out rows to evaluate; set eval.dataset")
        if held is None and not body.get("version"):
            raise UserError(f"run {run}: no server holds weights yet; ask again in a while")
        wanted = str(body.get("version") or held)
        if not is_version(wanted):
            raise UserError(f"version: got {wanted:.100}, need one like 1-42")
        since = Version.parse(wanted)
        made = await self._evaluator.made()
        found = min((version for version in made if version >= since), default=None)
        if found is None and self._asked is None:
            self._asked = since
            self._progress.announce()
        return {"version": wanted, "records": msgspec.to_builtins(made[found]) if found is not None else []}

    def waiting(self, waiter: str) -> AbstractContextManager[wait_graph.Wait]:
        """Register a wait for progress: for the first evaluation, for servers to hold a version, or for the trainer."""
        held = self._accounts.held
        if waiter == wait_graph.ADMISSION and held is not None and not self.is_first_done:
            return wait_graph.on(wait_graph.evaluation(str(held)), waiter=waiter)
        if self.newest is not None and str(held) != self.newest.version:
            return wait_graph.on(wait_graph.weights(self.newest.version), "all servers to hold", waiter=waiter)
        return wait_graph.on(wait_graph.TRAINER, "the progress of", waiter=waiter)
