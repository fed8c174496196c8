"""``verifiers:TASKSET``: an installed taskset of the verifiers package (0.4), played by its harness.

Tasks become rows; an episode runs against ``policy.base_url`` with the key of its trajectory, so that each call of the
model is recorded as any agent's is, token for token, whatever program the harness starts. The package is imported for
rows and on nodes alone.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
from pydantic import ConfigDict, Field

from areal_async.api import Policy
from areal_async.environments.environment import Environment, Options, note_metrics
from areal_async.errors import UserError, WorkflowError
from areal_async.protocol.types import Prompt
from areal_async.user_files import mistakes_in

EPISODES_PER_SERVING = 256
"""Episodes for which the package's servers live: they keep a client for each key that they have seen."""
NUM_ENDLESS = 256
"""Tasks that are taken of a taskset that never ends."""
MAX_REASON_CHARACTERS = 1000
KEY_VARIABLE = "AREAL_ASYNC_EPISODE_API_KEY_"
"""Before the variable in which the package looks for the key of one episode; what it starts never inherits those."""


class VerifiersOptions(Options):
    """Options of ``verifiers:TASKSET``: those below; all others are the package's own, as after its ``--env.``."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    select: dict[str, Any] = {}
    """Which tasks are taken, as the package's ``--select.`` has it: ``limit``, ``shuffle``, ``include.idx``."""
    model: str = Field(default="policy", min_length=1)
    """The name that harnesses call the model by; some choose by it how they talk."""
    max_episodes: int = Field(default=32, ge=1, le=EPISODES_PER_SERVING)
    """Episodes that run at once on one node: the package makes a client for each, which takes the event loop
    a tenth of a second."""


class VerifiersEnvironment(Environment):
    """Tasks and episodes of one taskset; a node holds the package's servers while it runs."""

    def __init__(self, taskset: str, options: VerifiersOptions) -> None:
        self._what = f"verifiers:{taskset}"
        self._taskset = taskset
        self._options = options
        self._tasks: list[Any] = []
        self._servings = _Servings(self._load)
        self._running = asyncio.Semaphore(options.max_episodes)

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the tasks that ``select`` takes, each with the hash that the package has of it."""
        ids: set[str] = set()
        for index, task in enumerate(self._selected()):
            name = str(task.data.id or task.data.name or task.key[:16])
            task_id = name if name not in ids else f"{name}#{task.data.idx}"
            ids.add(task_id)
            yield {"task_id": task_id, "sha256": task.hash, "index": index}

    @asynccontextmanager
    async def on_node(self) -> AsyncIterator[None]:
        """Read the tasks, and hold the servers that episodes share."""
        self._tasks = await anyio.to_thread.run_sync(self._selected)
        async with anyio.create_task_group() as holding:
            holding.start_soon(self._servings.run)
            yield
            holding.cancel_scope.cancel()

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        """Run one episode; its reward is the mean over the traces that train.

        Raises:
            WorkflowError: the episode failed, or this node has another task than the one of the row.
        """
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        task = self._task(prompt)
        variable = f"{KEY_VARIABLE}{secrets.token_hex(8).upper()}"
        client = EvalClientConfig(base_url=policy.base_url, api_key_var=variable)
        os.environ[variable] = policy.api_key
        try:
            async with self._running, self._servings.one() as env:
                episode = await env.run_episode(task, ModelContext(model=self._options.model, client=client))
        finally:
            os.environ.pop(variable, None)
        for trace in episode.traces:
            metrics = {f"reward_{name}": one.score for name, one in trace.rewards.items() if one is not None}
            note_metrics(policy, {**trace.metrics, **metrics, "num_turns": trace.num_turns})
        if not episode.ok:
            raise WorkflowError(f"{self._what}: {_reason(episode)}")
        trained = [trace.reward for trace in episode.traces if trace.agent.trainable]
        if not trained:
            raise WorkflowError(f"{self._what}: got an episode of which no trace is to be trained, need one at least")
        return float(sum(trained) / len(trained))

    def _task(self, prompt: Prompt) -> Any:
        index, wanted = int(prompt["index"]), prompt["sha256"]
        if index >= len(self._tasks) or self._tasks[index].hash != wanted:
            raise WorkflowError(
                f"{self._what}: this node has another task at {index} than the run, need the same package and data"
            )
        return self._tasks[index]

    def _selected(self) -> list[Any]:
        """Return the tasks that ``select`` takes.

        Raises:
            UserError: there is no such taskset, or options that do not fit it.
        """
        from verifiers.v1.configs.select import SelectConfig

        with mistakes_in(self._what):
            taskset = self._load().taskset
            select = SelectConfig.model_validate(self._options.select)
            if not taskset.bounded and select.limit is None:
                select = select.model_copy(update={"limit": NUM_ENDLESS})
            return list(taskset.select(select))

    def _load(self) -> Any:
        """Return the package's environment for the taskset, with its agents."""
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        given = _with_harness_null(dict(self._options.model_extra or {}))
        own = given.get("taskset")
        given["taskset"] = {**(own if isinstance(own, dict) else {}), "id": self._taskset}
        # The servers of a run of its own grow with the episodes; those that belong to one would end with it.
        given.setdefault("interception", {"type": "elastic", "multiplex": EPISODES_PER_SERVING})
        config = resolve_env_config(given)
        config = _placed(config, given, self._what)
        return load_environment(config)


class _Serving:
    """One of the package's environments with its servers, for so many episodes."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.num_begun = 0
        self.num_running = 0
        self.is_ready = asyncio.Event()
        self.is_done = asyncio.Event()


class _Servings:
    """Environments that follow each other, each left when it has had its episodes and the last of them has ended.

    ``run`` enters and leaves them in tasks of its own: what an episode starts ends with the episode.
    """

    def __init__(self, load: Any) -> None:
        self._load = load
        self._now: _Serving | None = None
        self._is_wanted = asyncio.Event()
        self._is_there = asyncio.Condition()

    async def run(self) -> None:
        """Hold an environment for whoever asks.

        consumes:     the wish for another environment
        waits for:    that
        produces:     an environment that serves
        unblocked by: cancellation alone
        """
        async with anyio.create_task_group() as holding:
            while True:
                await self._is_wanted.wait()
                self._is_wanted.clear()
                serving = _Serving(await anyio.to_thread.run_sync(self._load))
                holding.start_soon(self._hold, serving)
                await serving.is_ready.wait()
                async with self._is_there:
                    self._now = serving
                    self._is_there.notify_all()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Any]:
        """Yield an environment that serves."""
        async with self._is_there:
            while self._now is None or self._now.num_begun == EPISODES_PER_SERVING:
                self._is_wanted.set()
                await self._is_there.wait()
            serving = self._now
            serving.num_begun += 1
            serving.num_running += 1
        try:
            yield serving.env
        finally:
            serving.num_running -= 1
            if not serving.num_running and serving.num_begun == EPISODES_PER_SERVING:
                serving.is_done.set()

    async def _hold(self, serving: _Serving) -> None:
        async with serving.env.serving():
            serving.is_ready.set()
            await serving.is_done.wait()


def _with_harness_null(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which the harness that is called ``null`` has that name: in YAML it is nothing."""
    return {
        name: _with_harness_null(value | ({"id": "null"} if name == "harness" and value.get("id", 0) is None else {}))
        if isinstance(value, dict)
        else value
        for name, value in options.items()
    }


def _placed(config: Any, given: Mapping[str, Any], what: str) -> Any:
    """Return the settings with agents of chat alone on this host; others run where they are told to.

    Raises:
        UserError: one runs what the model writes, and nobody has said where.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.configs.env import default_agent_harness
    from verifiers.v1.runtimes import SubprocessConfig
    from verifiers.v1.utils.loaders import harness_class

    placed = {}
    for name, agent in agent_config_fields(config).items():
        own = given.get(name)
        if isinstance(own, dict) and own.get("runtime"):
            continue
        harness = agent.harness if agent.harness is not None else default_agent_harness(config.taskset.id)
        if harness_class(harness.id).EXECUTES_CODE:
            raise UserError(
                f"{what}: the harness {harness.id} of {name} runs what the model writes; say where with "
                f"--env.{name}.runtime.type (docker, or subprocess for this host without walls), or take one that only "
                f"talks, --env.{name}.harness.id null"
            )
        placed[name] = agent.model_copy(update={"runtime": SubprocessConfig()})
    return config.model_copy(update=placed)


def _reason(episode: Any) -> str:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not errors:
        return "the episode failed, and says of nothing why"
    return f"{errors[-1].type}: {' '.join(errors[-1].message.split())}"[:MAX_REASON_CHARACTERS]


def environment(name: str, options: Mapping[str, Any]) -> Environment:
    """Return the environment of the taskset of this name."""
    return VerifiersEnvironment(name, VerifiersOptions.read(options, what=f"verifiers:{name}"))
