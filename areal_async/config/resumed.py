"""How the settings of a run that goes on differ from those it had: what is refused, and what is told.

What a run may never have otherwise stands in ``kept``; here is what depends on values. Invariant: what was
trained, recorded and settled under the settings of before is proved by those of now.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from areal_async.config.kept import why_kept
from areal_async.config.live import tie
from areal_async.config.paths import with_real_paths
from areal_async.config.settings import Settings
from areal_async.config.tree import items_of
from areal_async.environments.names import is_moved
from areal_async.errors import UserError
from areal_async.protocol.run_state import Changes

EMBEDDED = "embedded"
"""``bus.url`` of a broker of the run's own."""
ASIDE = ("run.directory", "metrics.traces_key")
"""Where a run was found, and a name that is made for it."""
MAX_VALUE = 100
"""Characters of a value that is told."""


class SettingDifference(NamedTuple):
    """A setting whose value differs; None stands for one that is not there at all."""

    name: str
    before: Any
    after: Any

    @property
    def sentence(self) -> str:
        """``trainer.lr was 1e-06, is 2e-06``."""
        return f"{self.name} was {self.before!r:.{MAX_VALUE}}, is {self.after!r:.{MAX_VALUE}}"


def differences(before: Settings, now: Settings) -> list[SettingDifference]:
    """Return every setting that differs, in the order of the file, but for those that say nothing of the run.

    Two spellings of a path are of one file, and do not differ.
    """
    was, is_now = (with_real_paths(one.model_dump(mode="json"), Settings) for one in (before, now))
    return [one for one in _differences(was, is_now, "") if one.name not in ASIDE]


def refuse_kept(before: Settings, now: Settings) -> None:
    """Check that a run may go on with these settings.

    Args:
        before: those that it recorded.

    Raises:
        UserError: one is otherwise that the run keeps.
    """
    found = [
        (one, why_kept(one.name) or _why_bound(before, now, one.name))
        for one in differences(before, now)
        if not is_moved(str(one.before), str(one.after))  # its rows are held against those of before
    ]
    if refused := [(one, why) for one, why in found if why]:
        told = "; ".join(one.sentence for one, _ in refused)
        raise UserError(
            f"run {now.run.name}: {told}; a run that goes on keeps that: {refused[0][1]}; put back what was, choose "
            "another --run.name, or give --fresh to start anew"
        )


def without(changes: Changes, names: Collection[str]) -> Changes:
    """Return operators' changes without those of some settings, which never hold again."""
    return Changes(by_setting={name: change for name, change in changes.by_setting.items() if name not in names})


def _why_bound(before: Settings, now: Settings, name: str) -> str:
    """Return why a setting that may change may not do so in this way; empty where it may."""
    if name.endswith("min_group_size"):
        raised = [
            task.name
            for task in now.tasks
            if now.rollout_of(task.name).min_group_size > before.rollout_of(task.name).min_group_size
        ]
        return f"groups of {', '.join(raised)} were trained with fewer siblings" if raised else ""
    if name.endswith(".sampling.max_new_tokens") and (why := tie(before, name)):
        return why
    if name == "algorithm.kl_coef" and before.algorithm.has_kl_reward != now.algorithm.has_kl_reward:
        return why_kept("algorithm.kl_in")
    if name == "bus.url" and EMBEDDED in (before.bus.url, now.bus.url):
        return "all that it knows lies in that broker"
    if name == "bus.replicas" and now.bus.replicas < before.bus.replicas:
        return "what is stored keeps its copies"
    return ""


def _differences(before: Any, now: Any, name: str) -> Iterator[SettingDifference]:
    inner = items_of(before), items_of(now)
    if inner[0] is None or inner[1] is None or not (inner[0] or inner[1]):
        if before != now:
            yield SettingDifference(name, before, now)
        return
    for key in dict.fromkeys([*inner[0], *inner[1]]):
        yield from _differences(inner[0].get(key), inner[1].get(key), f"{name}.{key}" if name else str(key))
