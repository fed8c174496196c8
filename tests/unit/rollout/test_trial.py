"""A trial tells of every sibling once, in order, with the cause and the user's own lines where it failed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from areal_async.api import GroupWorkflow, Policy, Rewards, Workflow, group_workflow
from areal_async.config.settings import EvalSettings, RolloutSettings, Settings
from areal_async.data.images import ImageCell
from areal_async.data.rows import RowPrompts
from areal_async.errors import Reject
from areal_async.protocol.types import Prompt, SlotStatus, Turn
from areal_async.rollout.endpoint.policy import PolicyMaker, ServedPolicy
from areal_async.rollout.endpoint.server import AgentEndpoint
from areal_async.rollout.rewards.decorator import reward
from areal_async.rollout.trial import Attempt, Trial
from areal_async.rollout.user_code.loop_interrupter import LoopInterrupter
from areal_async.rollout.user_code.source_location import UserCode
from areal_async.rollout.workflow_call import TaskWorkflow
from areal_async.vision.images import Image, take_image
from tests.unit.rollout.byte_model import END, ScriptedModel, codec
from tests.unit.rollout.seeing import picture, seeing_codec, shown, vision
from tests.unit.vision.pictures import encoded

pytestmark = pytest.mark.anyio

HERE = Path(__file__)
CALL = b'{"name": "add", "arguments": {"left": 1, "right": 2}}'


@reward
def is_there(text: str) -> float:
    return float(bool(text))


async def attempts_at(
    workflow: Workflow | GroupWorkflow,
    *answers: list[int],
    num_prompts: int = 1,
    num_siblings: int = 1,
    row: Mapping[str, Any] | None = None,
    episode_deadline_s: float = 60.0,
    loop_deadline_s: float = 60.0,
    wanted: Sequence[tuple[int, int]] = (),
    seed: int | None = None,
    model: ScriptedModel | None = None,
    num_samples: int = 1,
) -> list[Attempt]:
    """Run all siblings, or those that are wanted, as an evaluation of so many samples does."""
    heard: list[Attempt] = []
    user_code = UserCode(HERE)
    prompts = [Prompt(epoch=0, index=number, row=dict(row or {"question": "q"})) for number in range(num_prompts)]
    rollout = RolloutSettings(episode_deadline_s=episode_deadline_s)
    settings = Settings(rollout=rollout, eval=EvalSettings(samples=num_samples))
    model = model or ScriptedModel(*answers, *[[98, END] for _ in range(9)])
    async with AgentEndpoint() as endpoint:
        trial = Trial(
            TaskWorkflow("w", workflow, settings),
            PolicyMaker(generator=model, codec=codec(), endpoint=endpoint),
            user_code=user_code,
            version="0-0",
            eval_id="e" if wanted else None,
            seed=seed,
        )
        interrupter = LoopInterrupter(user_code, deadline_s=loop_deadline_s)
        async with anyio.create_task_group() as watching:
            watching.start_soon(interrupter.run_beats)
            with interrupter.watching():
                if wanted:
                    await trial.answer(prompts, wanted, heard.append)
                else:
                    await trial.run(prompts, num_siblings=num_siblings, on_attempt=heard.append)
            watching.cancel_scope.cancel()
    return heard


async def test_every_sibling_of_every_prompt_is_told_once_in_order_whoever_ends_first() -> None:
    later = iter([0.05, 0.0, 0.02, 0.0])

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        delay_s = next(later)
        await policy.complete([1, 2])
        await anyio.sleep(delay_s)
        return delay_s

    heard = await attempts_at(workflow, num_prompts=2, num_siblings=2)

    assert [(one.prompt.index, one.trajectory.slot.sibling) for one in heard] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [one.trajectory.slot.reward for one in heard] == [0.05, 0.0, 0.02, 0.0]
    assert all(one.trajectory.slot.status is SlotStatus.SCORED and not one.locations for one in heard)


async def test_answers_that_are_wanted_are_given_alone_each_as_it_ends() -> None:
    """One that takes long keeps no other from being kept."""

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.complete([1, 2])
        await anyio.sleep(0.05 if prompt.index == 0 else 0)
        return 1.0

    heard = await attempts_at(workflow, num_prompts=3, wanted=[(0, 4), (2, 0), (2, 1)])

    assert [(one.prompt.index, one.trajectory.slot.sibling) for one in heard] == [(2, 0), (2, 1), (0, 4)]


async def twice(prompt: Prompt, policy: Policy) -> float:
    for _ in range(2):
        await policy.complete([1, 2])
    return 1.0


async def seeds_of(wanted: Sequence[tuple[int, int]], *, seed: int | None = 1, num_samples: int = 2) -> list[Any]:
    model = ScriptedModel(*[[98, END] for _ in range(9)])
    await attempts_at(twice, num_prompts=3, wanted=wanted, seed=seed, model=model, num_samples=num_samples)
    return [params.get("sampling_seed") for _, params in model.calls]


async def test_each_call_of_an_answer_draws_by_a_seed_of_its_own_whatever_else_is_asked() -> None:
    alone, again, others = await seeds_of([(1, 0)]), await seeds_of([(1, 0)]), await seeds_of([(1, 1), (2, 0)])

    assert alone == again
    assert len({*alone, *others}) == 6
    assert all(0 <= seed < 2**31 for seed in alone)
    assert await seeds_of([(1, 0)], seed=2) != alone
    assert await seeds_of([(1, 0)], seed=None) == [None, None]
    assert await seeds_of([(1, 0)], num_samples=1) == [None, None], "a greedy answer draws nothing"


async def test_a_group_workflow_sees_all_siblings_of_a_prompt_at_once() -> None:
    @group_workflow
    async def ranked(prompt: Prompt, siblings: Sequence[Policy]) -> Sequence[float]:
        for policy in siblings:
            await policy.complete([1, 2])
        return [float(number) for number in range(len(siblings))]

    heard = await attempts_at(ranked, num_prompts=2, num_siblings=3)

    assert [(one.prompt.index, one.trajectory.slot.sibling, one.trajectory.slot.reward) for one in heard] == [
        (prompt, sibling, float(sibling)) for prompt in range(2) for sibling in range(3)
    ]
    assert all(len(one.turns) == 1 for one in heard)


async def test_times_tell_the_model_the_tools_and_the_rewards_apart() -> None:
    async def add(left: int, right: int) -> int:
        """Add."""
        await anyio.sleep(0.01)
        return left + right

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        done = await policy.act([{"role": "user", "content": "1"}], [add])
        return await is_there(done.text)

    (attempt,) = await attempts_at(workflow, [*CALL, END])

    times = attempt.times
    assert attempt.trajectory.slot.reason == ""
    assert attempt.trajectory.info["rollout/num_tool_calls"] == 1
    assert times.tools_s >= 0.009, "uvloop's timers count whole milliseconds"
    assert times.rewards_s > 0
    assert times.total_s >= times.model_s + times.tools_s + times.rewards_s
    assert len(attempt.turns) == 2
    assert all(0 <= turn.first_token_s <= turn.duration_s for turn in attempt.turns)


async def held_up(prompt: Prompt, policy: Policy) -> float:
    await policy.complete([1, 2])
    while True:
        pass


async def hanging(prompt: Prompt, policy: Policy) -> float:
    await policy.complete([1, 2])
    await anyio.sleep(60)
    return 1.0


async def without_column(prompt: Prompt, policy: Policy) -> float:
    await policy.complete([1, 2])
    return float(prompt["answer"])


async def of_a_group(prompt: Prompt, policy: Policy) -> float:
    await policy.complete([1, 2])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(broken)
    return 1.0


async def broken() -> None:
    raise RuntimeError("no more")


async def rejecting(prompt: Prompt, policy: Policy) -> float:
    await policy.complete([1, 2])
    raise Reject("too easy")


async def nonsense(prompt: Prompt, policy: Policy) -> Rewards:
    await policy.complete([1, 2])
    return "good"  # type: ignore[return-value]


async def denied(prompt: Prompt, policy: ServedPolicy) -> float:
    await policy.complete([1, 2])
    headers = {"authorization": f"Bearer {policy.api_key}"}
    async with httpx.AsyncClient(base_url=policy.base_url, headers=headers, trust_env=False) as http:
        asked = {"model": "m", "messages": [{"role": "user", "content": "q"}], "temperature": -1}
        await http.post("/chat/completions", json=asked)
    raise ValueError("no answer")


@pytest.mark.parametrize(
    ("workflow", "reason", "last_location"),
    [
        (held_up, "held up the event loop for rollout.loop_deadline_s = 1 s, at", "in held_up"),
        (hanging, "workflow w: ran past rollout.episode_deadline_s = 1 s", "in hanging"),
        (
            without_column,
            "workflow w: ColumnError: row 0 has no column 'answer', its columns are question",
            "in without_column",
        ),
        (of_a_group, "workflow w: RuntimeError: no more", "in broken"),
        (rejecting, "too easy", "in rejecting"),
        (denied, "endpoint: refused a request of the agent: ", "in denied"),
        (nonsense, "workflow w: returned 'good', need a float", None),
    ],
)
async def test_what_went_wrong_is_told_with_the_users_own_line(
    workflow: Workflow, reason: str, last_location: str | None
) -> None:
    (attempt,) = await attempts_at(
        workflow,
        episode_deadline_s=1.0 if workflow is hanging else 60.0,
        loop_deadline_s=1.0 if workflow is held_up else 60.0,
    )

    slot = attempt.trajectory.slot
    assert slot.status is (SlotStatus.REJECTED if workflow is rejecting else SlotStatus.FAILED)
    assert slot.reason.startswith(reason)
    assert all(HERE.name in location.file for location in attempt.locations)
    assert (str(attempt.locations[-1]).endswith(last_location) if last_location else not attempt.locations) is True
    assert len(attempt.sequences) == len(attempt.turns) == 1, "what the model said is kept for the user to see"


async def test_each_turn_is_timed_by_its_own_call() -> None:
    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.chat([{"role": "user", "content": "q"}], n=3)
        return 0.0

    (attempt,) = await attempts_at(workflow)

    said: list[Turn] = [timed.turn for timed in attempt.turns]
    assert len(said) == len({id(turn) for turn in said}) == 3


async def test_a_workflow_is_shown_the_images_of_its_row_and_people_a_word_for_each() -> None:
    seen: list[Image] = []

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        seen.append(prompt["images"][0])
        reply = await policy.chat([shown(prompt["images"][0])])
        return float(len(reply.token_ids))

    row = {"images": [ImageCell(bytes=encoded(picture("red")), path=None)], "question": "q"}
    heard: list[Attempt] = []
    model = ScriptedModel([98, END])
    async with AgentEndpoint() as endpoint:
        trial = Trial(
            TaskWorkflow("w", workflow, Settings()),
            PolicyMaker(generator=model, codec=seeing_codec(), endpoint=endpoint),
            user_code=UserCode(HERE),
            version="0-0",
        )
        await trial.run([Prompt(epoch=0, index=0, row=row)], num_siblings=1, on_attempt=heard.append)

    (attempt,) = heard
    assert attempt.trajectory.slot.status is SlotStatus.SCORED, attempt.trajectory.slot.reason
    assert seen == [take_image(picture("red"), vision())]
    assert model.seen == [seen]
    assert attempt.prompt.row == {"images": ["Image(width=64, height=64)"], "question": "q"}


async def test_a_row_of_images_fails_a_model_that_does_not_see_where_they_are_read() -> None:
    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.complete([1, 2])
        return float(prompt["image"] is None)

    (attempt,) = await attempts_at(workflow, row={"image": ImageCell(bytes=encoded(picture("red")), path=None)})

    assert attempt.trajectory.slot.status is SlotStatus.FAILED
    assert "ImageError: row 0, column image: got an image, which the model" in attempt.trajectory.slot.reason


async def test_a_row_is_read_when_its_turn_has_come() -> None:
    read: list[int] = []

    class Rows(list[dict[str, Any]]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    prompts = RowPrompts(Rows([{"question": str(number)} for number in range(9)]), range(3, 9))

    assert (len(prompts), read) == (6, [])
    assert [one.index for one in prompts[4:]] == [7, 8]
    assert prompts[0].row == {"question": "3"}
    assert read == [7, 8, 3]
