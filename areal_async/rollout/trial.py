"""Run a workflow on a few rows, by the very code of a node, and keep all that became of it; nothing is stored.

What a node shares with others it does without: no bus, no tickets, no trainer. Invariant: every sibling ends as an
``Attempt``, told in order, whatever user code does.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import anyio
import structlog

from areal_async.protocol.types import GroupId, Prompt, Trajectory
from areal_async.protocol.types import Sequence as TokenSequence
from areal_async.rollout.endpoint.policy import PolicyMaker
from areal_async.rollout.policy.generation import Generator, SeededGenerator
from areal_async.rollout.policy.merge import merge_turns
from areal_async.rollout.row_images import take_prompt
from areal_async.rollout.stopwatch import TimedGenerator, TimedTurn, Times
from areal_async.rollout.user_code.source_location import SourceLocation, UserCode
from areal_async.rollout.workflow_call import TaskWorkflow, WorkflowCall
from areal_async.sandbox import set_max_boxes
from areal_async.sandbox.keeper import KEEPERS
from areal_async.telemetry import spans, wait_graph

TRIAL = "trial"
"""Who waits, and whose trajectories these are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One sibling, whatever became of it."""

    prompt: Prompt
    trajectory: Trajectory
    turns: list[TimedTurn]
    """All that were recorded, also where the trajectory failed."""
    sequences: list[TokenSequence]
    """The turns joined: what would be trained if it was scored."""
    times: Times
    locations: list[SourceLocation] = field(default_factory=list)
    """Where in the user's code it failed, outermost first; empty where that says nothing."""


class Trial:
    """What all attempts share. Its maker enters the endpoint and the generator."""

    def __init__(
        self,
        workflow: TaskWorkflow,
        policies: PolicyMaker,
        *,
        user_code: UserCode,
        version: str,
        eval_id: str | None = None,
        seed: int | None = None,
    ) -> None:
        """Take as ``version`` what stands for the tokens' where no model was called.

        Args:
            eval_id: names the evaluation that this is, in which siblings are sampled as held-out rows are, and one at
                a time; ``None`` samples as training does.
            seed: each answer is drawn by it, its row and its sibling, so whoever is asked with the same seed draws
                alike; ``None`` leaves that to the servers.
        """
        settings = workflow.settings
        self._workflow = workflow
        self._policies = policies
        self._user_code = user_code
        self._version = version
        self._eval_id = eval_id
        self._seed = seed
        self._sampling = workflow.rollout.sampling if eval_id is None else settings.eval_sampling_of(workflow.name)
        set_max_boxes(settings.rollout.max_boxes)
        self._limiter = anyio.CapacityLimiter(settings.rollout.max_trajectories_per_node)

    async def run(self, prompts: Sequence[Prompt], *, num_siblings: int, on_attempt: Callable[[Attempt], None]) -> None:
        """Run all siblings of all prompts side by side; ``on_attempt`` takes each once, in order, as it ends."""
        num_together = num_siblings if self._workflow.sees_group and self._eval_id is None else 1
        calls: list[tuple[int, Sequence[int]]] = [
            (place, range(first, first + num_together))
            for place in range(len(prompts))
            for first in range(0, num_siblings, num_together)
        ]
        ended: dict[int, list[Attempt]] = {}
        num_reported = 0

        def report(number: int, attempts: list[Attempt]) -> None:
            nonlocal num_reported
            ended[number] = attempts
            while num_reported in ended:
                for attempt in ended.pop(num_reported):
                    on_attempt(attempt)
                num_reported += 1

        await self._run_calls(prompts, calls, report)

    async def answer(
        self, prompts: Sequence[Prompt], wanted: Sequence[tuple[int, int]], on_attempt: Callable[[Attempt], None]
    ) -> None:
        """Run some siblings, each given as its prompt's place and its own; ``on_attempt`` takes each as it ends."""

        def report(_: int, attempts: list[Attempt]) -> None:
            on_attempt(*attempts)

        await self._run_calls(prompts, [(place, (sibling,)) for place, sibling in wanted], report)

    async def _run_calls(
        self,
        prompts: Sequence[Prompt],
        calls: Sequence[tuple[int, Sequence[int]]],
        report: Callable[[int, list[Attempt]], None],
    ) -> None:
        async def run_one(number: int) -> None:
            async with self._limiter:
                place, siblings = calls[number]
                attempts = await self.run_siblings(prompts[place], siblings)
            report(number, attempts)

        async with aclosing(KEEPERS), anyio.create_task_group() as running:
            for number in range(len(calls)):
                running.start_soon(run_one, number)

    async def run_siblings(self, prompt: Prompt, siblings: Sequence[int]) -> list[Attempt]:
        """Run what one call of the workflow fills, as ``group`` does for a ticket."""
        group_id = str(GroupId(prompt.epoch, prompt.index, 0))
        slots = [self._workflow.slot(group_id, sibling, producer=TRIAL, version=self._version) for sibling in siblings]
        generators = [TimedGenerator(self._generator(prompt, sibling)) for sibling in siblings]
        policies = [
            replace(self._policies, generator=generator).policy(
                self._sampling, slot.sample_uid, slot.max_sequence_tokens
            )
            for generator, slot in zip(generators, slots, strict=True)
        ]
        call = WorkflowCall(self._workflow, policies, keeps_error=True)
        shown = await take_prompt(prompt, self._policies.codec.vision, model=self._workflow.settings.model.path)
        started = time.monotonic()
        with (
            wait_graph.doing(wait_graph.slot(group_id, siblings[0]), "the workflow of", waiter=TRIAL),
            wait_graph.recording_ended() as ended,
            structlog.contextvars.bound_contextvars(sample_uid=slots[0].sample_uid),
            spans.tried(
                self._workflow.name, eval_id=self._eval_id or "", index=prompt.index, sample=siblings[0]
            ) as span,
        ):
            trajectories = await call.fill(shown.prompt, slots)
            spans.note_trajectories(span, trajectories)
        total_s = time.monotonic() - started
        return [
            Attempt(
                prompt=shown.told,
                trajectory=trajectory,
                turns=[generator.timed(turn) for turn in policy.turns],
                sequences=merge_turns(policy.turns),
                times=Times.of(total_s=total_s, calls=generator.calls, waits=ended),
                locations=self._user_code.locations(call.error) if call.error else [],
            )
            for trajectory, policy, generator in zip(trajectories, policies, generators, strict=True)
        ]

    def _generator(self, prompt: Prompt, sibling: int) -> Generator:
        plain = self._policies.generator
        return plain if self._seed is None else SeededGenerator(plain, f"{self._seed}.{prompt.index}.{sibling}")
