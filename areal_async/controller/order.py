"""In which order a run's prompts have their turn, given its record and what operators want of the mix of its tasks."""

from areal_async.config.settings import Settings
from areal_async.controller.admission import ADMISSION_BATCH, Mixing, first_free
from areal_async.controller.curriculum import MAX_LOOKED_AT, Visits, curriculum_of
from areal_async.controller.sampler import MixedSampler, TaskShare, sampler_of, whole_weights
from areal_async.controller.tasks import Tasks
from areal_async.errors import UserError
from areal_async.protocol.types import Admitted, GroupId


class Order:
    """A run's, from when a controller begins."""

    def __init__(self, settings: Settings, tasks: Tasks, visits: Visits, *, record: Admitted) -> None:
        """``record``: as the controller takes it over."""
        self._tasks = tasks
        self.sampler = sampler_of(self._shares(settings), seed=settings.run.seed, admitted=record)
        self.curriculum = curriculum_of(settings, self.sampler, visits)
        self._first_free = first_free(record, has_curriculum=self.curriculum is not None)

    def may_be_admitted(self, group: GroupId, record: Admitted) -> bool:
        """Say whether a prompt may have had a ticket: none has to which the order comes after the next admission."""
        slack = ADMISSION_BATCH if self.curriculum is None else MAX_LOOKED_AT
        return group.index < self.sampler.num_rows and self.sampler.is_among_first(
            group, record.num_fresh + slack, record.mixes
        )

    def mixing(self, settings: Settings) -> Mixing:
        """Return how tasks are to take turns by these settings."""
        return Mixing(weights=whole_weights(self._shares(settings)), earliest=self._first_free)

    def shares(self, admitted: Admitted) -> dict[str, float]:
        """Return which part of the prompts each task has where the record is; empty where nobody decides about that."""
        if not isinstance(self.sampler, MixedSampler):
            return {}
        return dict(zip(self._tasks.names, self.sampler.shares_at(admitted.num_fresh, admitted.mixes), strict=True))

    def check_change(self, setting: str) -> None:
        """Refuse what the settings allow and this very run does not: a mix of tasks that have one order in common.

        Raises:
            UserError: it is one.
        """
        if setting.endswith(".ratio") and not isinstance(self.sampler, MixedSampler):
            raise UserError(
                f"{setting}: cannot change in this run: it was started before each task had epochs of its own, and the "
                "rows of all have one order in common; start another one"
            )

    def _shares(self, settings: Settings) -> list[TaskShare]:
        ratios = {task.name: task.ratio for task in settings.tasks}
        rows = zip(self._tasks.names, self._tasks.num_rows, strict=True)
        return [TaskShare(count, ratios.get(name, 1.0)) for name, count in rows]
