"""Whether prompts and answers fit the context and a packed row, by running each workflow up to its first call.

Nothing is generated: whoever is asked for an answer notes how long the prompt was, and gives none. Only the beginning
of a conversation is seen so; what it grows to, ``try`` shows.
"""

import functools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from random import Random
from typing import Any

import anyio
import anyio.to_thread

from areal_async.config.settings import Settings, TaskSettings
from areal_async.data.images import row_at
from areal_async.data.rows import load_rows
from areal_async.doctor.preflight.findings import PreflightFinding, error, good, warning
from areal_async.errors import GenerationError, Reject, RolloutError, UserError
from areal_async.inference.pool import KEPT_TOKENS, MIN_ROOM_TOKENS, ServerHandle, ServerPool
from areal_async.protocol.types import Prompt, Turn
from areal_async.rollout.endpoint.policy import PolicyMaker
from areal_async.rollout.endpoint.server import AgentEndpoint
from areal_async.rollout.named_policies import FrozenModel
from areal_async.rollout.policy.text import TextCodec, load_codec
from areal_async.rollout.row_images import take_prompt
from areal_async.rollout.user_code.boundary import text_of
from areal_async.rollout.user_code.per_node import made_for
from areal_async.rollout.user_code.workflows import load_workflow
from areal_async.rollout.workflow_call import TaskWorkflow, WorkflowCall

MAX_ROWS = 64
"""Looked at, spread evenly over a data set."""
ROWS_AT_ONCE = 8
LOOK_DEADLINE_S = 20.0
"""For the rows of one task; an agent is a program that has to start for each."""


@dataclass
class Lengths:
    """What the first calls of a task's workflow asked for."""

    num_rows: int
    """Rows of the data set."""
    calls: list[tuple[int, int]] = field(default_factory=list)
    """Tokens of the prompt and of the longest answer that was asked for; one pair per row that came so far."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Reason -> how many other rows came to no call for it."""


class _Listener:
    """Answers nobody; keeps the first thing that it was asked."""

    def __init__(self) -> None:
        self.heard: tuple[int, int] | None = None

    async def generate(
        self, prompt_ids: list[int], sampling_params: Mapping[str, Any], **_: Any
    ) -> tuple[Turn, ServerHandle]:
        if self.heard is None:
            self.heard = len(prompt_ids), sampling_params["max_new_tokens"]
        raise GenerationError("generation: this is a look before a run, which has no server")


async def check_lengths(settings: Settings, *, model_context: int) -> list[PreflightFinding]:
    """Look at every task. What cannot be loaded is told of by the checks of data, models and workflows."""
    findings: list[PreflightFinding] = []
    try:
        codec = await anyio.to_thread.run_sync(load_codec, settings.model.path, settings.rollout.template)
    except UserError:
        return findings
    context = settings.inference.context_length or model_context
    for task in settings.tasks:
        try:
            load = functools.partial(load_rows, settings.dataset_of(task), shows_progress=False)
            rows = await anyio.to_thread.run_sync(load)
            with redirect_stdout(sys.stderr):  # what a workflow prints is not for who reads the findings
                lengths = await _measured(settings, task, rows, codec)
        except UserError:
            continue
        findings += judge(f"lengths of {task.name}", lengths, context=context, budget=settings.trainer.token_budget)
    return findings


def judge(check: str, lengths: Lengths, *, context: int, budget: int) -> Iterator[PreflightFinding]:
    """Hold what was asked for against the context of the servers and a packed row, both in tokens."""
    calls, num_looked_at = lengths.calls, len(lengths.calls) + lengths.reasons.total()
    sample = f"{num_looked_at:,} of {lengths.num_rows:,} rows looked at"
    if lengths.reasons:
        (reason, count), num_mute = lengths.reasons.most_common(1)[0], lengths.reasons.total()
        others = f" ({num_mute - count} for other reasons)" if num_mute > count else ""
        saw = f"{sample}; in {num_mute} of them the workflow came to no call of the model: {reason}{others}"
        yield warning(check, saw, "look at one with `try`")
    if not calls:
        return
    served = (context - KEPT_TOKENS, context - MIN_ROOM_TOKENS, f"the context of {context:,} tokens")
    trained = (budget, budget - 1, f"trainer.token_budget = {budget:,}")
    most, longest_prompt, which = min(served, trained)
    raised = "raise inference.context_length, as far as the model goes" if most == served[0] else "raise it"
    prompts = [prompt for prompt, _ in calls]
    wanted = max(answer for _, answer in calls)
    full = [prompt for prompt in prompts if prompt > longest_prompt]
    cut = [prompt + answer for prompt, answer in calls if prompt <= longest_prompt and prompt + answer > most]
    asked = f"{sample}: prompts of {min(prompts):,} to {max(prompts):,} tokens, answers of up to {wanted:,}"
    if full:
        tell = error if len(full) == len(calls) else warning
        saw = f"{asked}; {len(full)} prompts leave no room for an answer in {which}, and their trajectories fail"
        yield tell(check, saw, f"shorten the prompts or leave these rows out, or {raised}")
    if cut:
        room = most - max(prompt for prompt in prompts if prompt <= longest_prompt)
        saw = f"{asked}; {len(cut)} of these need up to {max(cut):,} tokens with {which}"
        cure = f"lower rollout.sampling.max_new_tokens to {room:,}, or {raised}"
        yield warning(check, f"{saw}: the answer is cut there, and counts in truncated_share", cure)
    if not full and not cut:
        yield good(check, f"{asked}: at most {max(map(sum, calls)):,} tokens, {which} holds them")


async def _measured(settings: Settings, task: TaskSettings, rows: Any, codec: TextCodec) -> Lengths:
    plain = load_workflow(task.workflow, policies=settings.policies, env=settings.env_of(task))
    mute = {
        name: FrozenModel(generator=_Listener(), codec=codec, pool=ServerPool([], deadline_s=LOOK_DEADLINE_S))
        for name in settings.frozen_policies
    }
    lengths = Lengths(num_rows=len(rows))
    num_looked_at = min(MAX_ROWS, len(rows))
    indices = [number * len(rows) // num_looked_at for number in range(num_looked_at)]
    Random(0).shuffle(indices)  # those that are reached in time are spread as well
    if made_for(plain):
        made = ", ".join(made_for(plain))
        lengths.reasons.update({f"it waits for {made}, which a look before a run does not make": len(indices)})
        return lengths
    workflow = TaskWorkflow(task.name, plain, settings, mute)
    at_once = anyio.CapacityLimiter(ROWS_AT_ONCE)

    async def look(index: int) -> None:
        listener = _Listener()
        maker = PolicyMaker(generator=listener, codec=codec, endpoint=endpoint)
        policy = maker.policy(workflow.rollout.sampling, f"{index}")
        reason = "it returned without a call"
        async with at_once:
            prompt = Prompt(epoch=0, index=index, row=row_at(rows, index))
            prompt = (await take_prompt(prompt, codec.vision, model=settings.model.path)).prompt
            try:
                await WorkflowCall(workflow, [policy], deadline_s=2 * LOOK_DEADLINE_S).run(prompt)
            except (RolloutError, Reject) as exc:
                reason = text_of(exc)
        if listener.heard is not None:
            lengths.calls.append(listener.heard)
        else:
            lengths.reasons[reason] += 1

    async with AgentEndpoint() as endpoint:
        with anyio.move_on_after(LOOK_DEADLINE_S):
            async with anyio.create_task_group() as looking:
                for index in indices:
                    looking.start_soon(look, index)
    if not lengths.calls and not lengths.reasons:
        lengths.reasons.update({f"it called it in no row within {LOOK_DEADLINE_S:g} s": num_looked_at})
    return lengths
