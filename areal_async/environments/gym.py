"""``gym:ID``: Gymnasium environments that speak and hear text. The package is imported for rows and on nodes alone.

Each row seeds one ``reset``: the first has ``first_seed``, each further one the next number, whatever else changes.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from pydantic import Field

from areal_async.api import Policy, Rewards
from areal_async.environments.environment import Environment
from areal_async.environments.turns import SeededOptions, Step, play
from areal_async.errors import UserError, WorkflowError
from areal_async.protocol.types import Prompt
from areal_async.user_files import import_file, mistakes_in

T = TypeVar("T")


class GymOptions(SeededOptions):
    """Options of ``gym:ID``."""

    file: str = ""
    """Python file that registers the environment as it is imported. Empty for what Gymnasium itself finds."""
    kwargs: dict[str, Any] = {}
    """What ``gymnasium.make`` is given beside the id."""
    max_threads: int = Field(default=64, ge=1, le=1024)
    """Calls of ``reset`` and ``step`` that run at once on one node."""


class GymEnvironment(Environment):
    """Each episode has an environment of its own, made and stepped in threads."""

    def __init__(self, env_id: str, options: GymOptions) -> None:
        self._what = f"gym:{env_id}"
        self._id = env_id
        self._options = options
        self._threads = anyio.CapacityLimiter(options.max_threads)

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield a task for each seed."""
        self._find()
        yield from self._options.rows(self._id, {"id": self._id, "kwargs": self._options.kwargs})

    @asynccontextmanager
    async def on_node(self) -> AsyncIterator[None]:
        """Import what the episodes need, which takes a while."""
        await anyio.to_thread.run_sync(self._find)
        yield

    async def episode(self, prompt: Prompt, policy: Policy) -> Rewards:
        """Play one environment, reset with the seed of the row."""
        env = await self._called(self._make)
        try:
            observation, _ = await self._called(lambda: env.reset(seed=int(prompt["seed"])))

            async def step(action: str) -> Step:
                seen, reward, terminated, truncated, _ = await self._called(lambda: env.step(action))
                return Step(self._text(seen), float(reward), bool(terminated or truncated))

            return await play(policy, self._text(observation), step, self._options, what=self._what)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(self._options.step_deadline_s):
                await anyio.to_thread.run_sync(env.close, abandon_on_cancel=True, limiter=self._threads)

    def _find(self) -> None:
        """Make sure that there is such an environment.

        Raises:
            UserError: there is none, or the file that registers it cannot be imported.
        """
        import gymnasium

        if self._options.file:
            path = Path(self._options.file)
            with mistakes_in(f"{self._what}: importing {path}"):
                import_file(path, what=f"{self._what}: env.file")
        try:
            gymnasium.spec(self._id)
        except (gymnasium.error.Error, ImportError) as exc:
            remedy = "" if self._options.file else "; name the file that registers it with --env.file"
            raise UserError(f"{self._what}: {exc}{remedy}") from exc

    def _make(self) -> Any:
        import gymnasium

        # Gymnasium's own checker warns of texts that a space does not list, and what a model says is any text.
        env = gymnasium.make(self._id, disable_env_checker=True, **self._options.kwargs)
        for name, space in (("observations", env.observation_space), ("actions", env.action_space)):
            if not isinstance(space, gymnasium.spaces.Text):
                raise WorkflowError(
                    f"{self._what}: its {name} are {space!r:.80}, need a Text space; wrap it in one that speaks and "
                    "hears text, registered by --env.file"
                )
        return env

    async def _called(self, call: Callable[[], T]) -> T:
        """Return what a call of the environment returns, made in a thread of its own.

        Raises:
            WorkflowError: it takes too long; its thread goes on, and counts among those of the node until it ends.
        """
        deadline_s = self._options.step_deadline_s
        with anyio.move_on_after(deadline_s):
            return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)
        raise WorkflowError(f"{self._what}: a call took longer than env.step_deadline_s = {deadline_s:g} s")

    def _text(self, observation: object) -> str:
        if not isinstance(observation, str):
            raise WorkflowError(f"{self._what}: got the observation {observation!r:.80}, need a text")
        return observation


def environment(name: str, options: Mapping[str, Any]) -> Environment:
    """Return the environment with this id."""
    return GymEnvironment(name, GymOptions.read(options, what=f"gym:{name}"))
