"""What an environment is to a run: ordered tasks, an episode of one of them, and a place on each node.

Invariant: an environment is made, and refuses wrong options, without importing the library that it adapts.
"""

import hashlib
import importlib
import importlib.util
import json
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from areal_async.api import Policy, Rewards, Workflow, per_node
from areal_async.environments.names import environment_name
from areal_async.errors import UserError
from areal_async.protocol.types import Prompt

TASK_ID, CONTENT = "task_id", "sha256"
"""Columns that each row of an environment has: a stable name, and the hash of what the task is."""
MAX_TASKS = 100_000
MAX_ID_CHARACTERS = 512
MAX_ROW_BYTES = 1 << 20
MAX_METRICS = 16
"""Of an environment's own, for one trajectory."""
MAX_METRIC_CHARACTERS = 60
MAX_METRIC = 1e9
METRICS = "env/"
"""Before the name of each metric of an environment: in ``metrics.jsonl`` it is ``info/env/<name>``."""


class Environment(ABC):
    """One environment of a run, made from ``SCHEME:NAME`` and the options that ``env`` has for it.

    It is made in the process that reads the rows (the controller) and in each node; both need what it imports.
    """

    @abstractmethod
    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Yield the tasks in their order, the same ones whenever it is called.

        Each has a ``task_id``, which no other has, and a ``sha256`` of what the task is; without one, that is the hash
        of the row. A run records both, and does not go on with others.

        Raises:
            UserError: they cannot be read.
        """

    @abstractmethod
    async def episode(self, prompt: Prompt, policy: Policy) -> Rewards:
        """Play the task of a row against a policy, as a workflow does, and return what it came to."""

    def on_node(self) -> AbstractAsyncContextManager[None]:
        """Hold what all episodes of a node share: entered before the first of them, left after the last."""
        return _nothing()


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


class Options(BaseModel):
    """The options of one kind of environment: ``env`` of the settings. Names that it does not have are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)

    @classmethod
    def read(cls, options: Mapping[str, Any], *, what: str) -> Self:
        """Return options, checked.

        Args:
            what: they are of, as a sentence begins with it.

        Raises:
            UserError: a name that is none, or a value that does not fit.
        """
        try:
            return cls.model_validate(dict(options))
        except ValidationError as exc:
            first = exc.errors()[0]
            name, got = ".".join(map(str, first["loc"])), f"{first['input']!r:.80}"
            if first["type"] == "extra_forbidden":
                known = ", ".join(cls.model_fields) or "none"
                raise UserError(f"{what}: got env.{name}, which it does not have, need any of {known}") from exc
            raise UserError(f"{what}: env.{name}: got {got}: {first['msg'].removeprefix('Value error, ')}") from exc


def make_environment(spec: str, options: Mapping[str, Any]) -> Environment:
    """Return the environment that ``SCHEME:NAME`` means.

    Raises:
        UserError: what it imports is not installed, or an option does not fit.
    """
    found = environment_name(spec)
    assert found is not None, spec
    kind, what = found.kind, f"environment {spec}"
    if kind.package and importlib.util.find_spec(kind.package) is None:
        raise UserError(
            f"{what}: needs the package {kind.package}, which is not installed here; "
            f"pip install 'areal-async[{kind.extra}]' where the run is started and on each host with a node"
        )
    made = importlib.import_module(kind.module).environment(found.name, options)
    assert isinstance(made, Environment), what
    return made


def workflow_of(spec: str, options: Mapping[str, Any]) -> Workflow:
    """Return the workflow that plays an environment; what it needs on a node is made there once, as by ``@per_node``.

    Raises:
        UserError: as ``make_environment`` says.
    """
    made = make_environment(spec, options)

    @per_node
    async def environment() -> AsyncIterator[Environment]:
        async with made.on_node():
            yield made

    async def episode(prompt: Prompt, policy: Policy, environment: Environment) -> Rewards:
        return await environment.episode(prompt, policy)

    workflow: Any = episode
    workflow.made_per_node = {environment.__name__: environment}
    return workflow  # type: ignore[no-any-return]


def tasks_of(environment: Environment, *, what: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of an environment, checked, each with its id and hash.

    Raises:
        UserError: one has no id, the id of another, or is too large; or there are too many.
    """
    seen: set[str] = set()
    for place, given in enumerate(environment.rows()):
        task_id = given.get(TASK_ID)
        if not isinstance(task_id, str) or not 0 < len(task_id) <= MAX_ID_CHARACTERS:
            raise UserError(
                f"{what}: task {place} has the id {task_id!r:.80}, need a text of 1 to {MAX_ID_CHARACTERS} characters"
            )
        if task_id in seen:
            raise UserError(
                f"{what}: task {place} has the id {task_id!r:.80} of another, need a different one for each"
            )
        if place >= MAX_TASKS:
            raise UserError(f"{what}: got more than {MAX_TASKS:,} tasks, need at most so many; take a part of them")
        seen.add(task_id)
        row = {CONTENT: content_hash(given), **given}
        if (num_bytes := len(_canonical(row))) > MAX_ROW_BYTES:
            raise UserError(
                f"{what}: task {task_id} takes {num_bytes:,} bytes as a row, need at most {MAX_ROW_BYTES:,}"
            )
        yield row


def content_hash(value: object) -> str:
    """Return the SHA-256 of a value that JSON has, whatever the order of the keys in it."""
    return hashlib.sha256(_canonical(value)).hexdigest()


def note_metrics(policy: Policy, metrics: Mapping[str, object]) -> None:
    """Put an environment's own numbers among those of a trajectory, as ``env/<name>``; others are left out."""
    kept = 0
    for name, value in sorted(metrics.items()):
        if kept == MAX_METRICS:
            return
        if isinstance(value, int | float) and abs(value) <= MAX_METRIC:  # no NaN is
            clean = re.sub(r"[^A-Za-z0-9._/-]", "_", name)[:MAX_METRIC_CHARACTERS]
            policy.info[METRICS + clean] = float(value)
            kept += 1


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=repr).encode()
