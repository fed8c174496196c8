"""Policies by name: a role speaks in the same trajectory, a frozen model outside it, and who is missing is named."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from areal_async.api import Policy, RewardModel, Rewards, group_workflow
from areal_async.config.settings import PolicySettings, RolloutSettings, SamplingSettings, Settings
from areal_async.errors import GenerationError, UserError
from areal_async.inference.pool import ServerHandle, ServerPool
from areal_async.protocol.types import Prompt, SlotStatus, Trajectory, Turn
from areal_async.rollout.endpoint.policy import PolicyMaker, ServedPolicy
from areal_async.rollout.endpoint.server import AgentEndpoint
from areal_async.rollout.named_policies import FrozenModel, FrozenReward, role_sampling
from areal_async.rollout.user_code.workflows import check_all_taken, load_workflow, policies_taken
from areal_async.rollout.workflow_call import TaskWorkflow, WorkflowCall
from areal_async.vision.images import Image
from tests.unit.rollout.byte_model import END, ScriptedModel, codec
from tests.unit.rollout.called import PROMPT, slot_of

pytestmark = pytest.mark.anyio

QUESTION = [{"role": "user", "content": "q"}]
SAMPLING = SamplingSettings(max_new_tokens=8, temperature=0.7)
SETTINGS = Settings(
    rollout=RolloutSettings(sampling=SAMPLING),
    policies={
        "opponent": PolicySettings(sampling=SamplingSettings(top_p=0.5)),
        "judge": PolicySettings(path="org/judge", sampling=SamplingSettings(temperature=0.0)),
        "taste": PolicySettings(path="org/taste", kind="reward"),
    },
)


class LengthTaste:
    """Likes short conversations; what it is asked is kept."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.error: Exception | None = None

    async def score(self, prompt_ids: list[int]) -> float:
        self.prompts.append(prompt_ids)
        if self.error is not None:
            raise self.error
        return -float(len(prompt_ids))


class Table:
    """A trained and a frozen model, and one trajectory at a time."""

    def __init__(self, trained: ScriptedModel, frozen: ScriptedModel | None = None) -> None:
        self.trained = trained
        self.frozen = frozen or ScriptedModel()
        self.taste = LengthTaste()
        self.policy = self.new_policy(SAMPLING)

    def new_policy(self, sampling: SamplingSettings) -> ServedPolicy:
        return PolicyMaker(generator=self.trained, codec=codec()).policy(sampling, "uid")

    async def play(self, workflow: Callable[..., Awaitable[Rewards]]) -> Trajectory:
        model = FrozenModel(generator=self.frozen, codec=codec(), pool=ServerPool([], deadline_s=60.0))
        taste = FrozenReward(scorer=self.taste, codec=codec(), pool=ServerPool([], deadline_s=60.0))
        call = WorkflowCall(TaskWorkflow("play", workflow, SETTINGS, {"judge": model, "taste": taste}), [self.policy])
        (trajectory,) = await call.fill(PROMPT, [slot_of(0, ticket_version="1-0", max_sequence_tokens=1 << 10)])
        return trajectory


async def test_role_speaks_in_the_same_trajectory_under_its_own_name() -> None:
    table = Table(ScriptedModel([97, END], [98, END], [99, END]))

    async def duel(prompt: Prompt, policy: Policy, opponent: Policy) -> Rewards:
        first = await policy.chat(QUESTION)
        second = await opponent.chat([{"role": "user", "content": "other"}])
        third = await policy.chat([*QUESTION, first.message, {"role": "user", "content": second.text}])
        return {first.id: 1.0, second.id: -1.0, third.id: 1.0}

    trajectory = await table.play(duel)

    assert trajectory.slot.status is SlotStatus.SCORED, trajectory.slot.reason
    assert [turn.role for turn in table.policy.turns] == ["", "opponent", ""]
    assert table.policy.reply_ids == ["uid.1", "uid.2", "uid.3"], "no two replies have one id"
    assert len(trajectory.sequences) == 2, "each has its own conversation"
    assert trajectory.slot.num_output_tokens == 6
    assert sum(int(sequence.loss_mask.sum()) for sequence in trajectory.sequences) == 6
    assert table.policy.record.num_breaks == 0
    assert [params["top_p"] for _, params in table.trained.calls] == [1.0, 0.5, 1.0]


async def test_roles_that_ask_the_same_do_not_take_each_other_s_conversation() -> None:
    table = Table(ScriptedModel([97, END], [98, END], [99, END]))

    async def duel(prompt: Prompt, policy: Policy, opponent: Policy) -> Rewards:
        await policy.chat(QUESTION)
        said = await opponent.chat(QUESTION)
        await opponent.chat([*QUESTION, said.message, {"role": "user", "content": "x"}])
        return 1.0

    trajectory = await table.play(duel)

    assert table.trained.calls[2][0][: -len(b"user:x.assistant:")] == [*table.trained.calls[1][0], 98, END]
    assert len(trajectory.sequences) == 2
    assert table.policy.record.num_breaks == 0


async def test_frozen_model_leaves_no_token_in_the_trajectory() -> None:
    table = Table(ScriptedModel([97, END]), ScriptedModel([49, END], [50, END]))

    async def judged(prompt: Prompt, policy: Policy, judge: Policy) -> Rewards:
        answer = await policy.chat(QUESTION)
        verdict = await judge.chat([{"role": "user", "content": answer.text}])
        again = await judge.complete("b")
        judge.info["marks"] = float(verdict.text) + float(again.text)
        return float(verdict.text)

    trajectory = await table.play(judged)

    assert (trajectory.slot.status, trajectory.slot.reward) == (SlotStatus.SCORED, 1.0)
    assert [turn.output_ids for turn in table.policy.turns] == [[97, END]]
    assert trajectory.slot.num_output_tokens == 2
    assert (trajectory.info["marks"], trajectory.info["rollout/num_turns"]) == (3.0, 1.0)
    assert [params["temperature"] for _, params in table.frozen.calls] == [0.0, 0.0]


async def liked(prompt: Prompt, policy: Policy, taste: RewardModel) -> Rewards:
    answer = await policy.chat(QUESTION)
    return await taste.score([*QUESTION, answer.message])


async def test_reward_model_scores_the_whole_conversation_and_leaves_no_token_in_the_trajectory() -> None:
    table = Table(ScriptedModel([97, END]))

    trajectory = await table.play(liked)

    (asked,) = table.taste.prompts
    assert asked == codec().encode("user:q<end>assistant:a<end>"), "closed, and not opened for a reply"
    assert (trajectory.slot.status, trajectory.slot.reward) == (SlotStatus.SCORED, -float(len(asked)))
    assert trajectory.slot.num_output_tokens == 2


async def test_score_that_could_not_be_had_is_the_trajectory_s_failure_and_never_a_zero() -> None:
    table = Table(ScriptedModel([97, END]))
    table.taste.error = GenerationError("score: 6 requests in a row were not answered")

    trajectory = await table.play(liked)

    assert trajectory.slot.status is SlotStatus.FAILED
    assert "6 requests in a row were not answered" in trajectory.slot.reason


async def test_frozen_reply_cannot_be_credited() -> None:
    table = Table(ScriptedModel([97, END]), ScriptedModel([49, END]))

    async def judged(prompt: Prompt, policy: Policy, judge: Policy) -> Rewards:
        await policy.chat(QUESTION)
        return {(await judge.chat(QUESTION)).id: 1.0}

    trajectory = await table.play(judged)

    assert trajectory.slot.status is SlotStatus.FAILED
    assert "got rewards for replies ['uid.judge.1'], need ids out of ['uid.1']" in trajectory.slot.reason


async def test_trajectory_in_which_only_the_frozen_model_spoke_is_a_failure() -> None:
    table = Table(ScriptedModel(), ScriptedModel([49, END]))

    async def judged(prompt: Prompt, policy: Policy, judge: Policy) -> Rewards:
        await judge.chat(QUESTION)
        return 1.0

    trajectory = await table.play(judged)

    assert "returned without a call of the model" in trajectory.slot.reason


class Endless(ScriptedModel):
    """Says one token and never ends by itself."""

    num_ended = 0

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        *,
        preferred: ServerHandle | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
        images: Sequence[Image] = (),
    ) -> tuple[Turn, ServerHandle]:
        assert on_tokens is not None
        on_tokens([97])
        try:
            await anyio.sleep_forever()
        finally:
            self.num_ended += 1
        raise AssertionError


async def test_what_the_others_have_left_running_ends_with_the_trajectory() -> None:
    trained, frozen = Endless(), Endless()

    async def duel(prompt: Prompt, policy: Policy, opponent: Policy, judge: Policy) -> Rewards:
        for one in (opponent, judge):
            await anext(aiter(one.stream(QUESTION)))
        return 1.0

    await Table(trained, frozen).play(duel)
    await anyio.wait_all_tasks_blocked()

    assert (trained.num_ended, frozen.num_ended) == (1, 1)


@pytest.mark.parametrize("name", ["opponent", "judge"])
async def test_agent_may_speak_with_any_of_them_and_what_it_was_denied_is_the_trajectory_s(name: str) -> None:
    async with AgentEndpoint() as endpoint:
        policy = PolicyMaker(generator=ScriptedModel([97, END]), codec=codec(), endpoint=endpoint).policy(
            SAMPLING, "uid"
        )
        other = (
            policy.in_role(name, SAMPLING)
            if name == "opponent"
            else policy.beside(name, ScriptedModel([97, END]), codec(), SAMPLING)
        )
        async with httpx.AsyncClient(trust_env=False, headers={"Authorization": f"Bearer {other.api_key}"}) as http:
            for status in (200, 500):
                body = {"model": "any", "messages": QUESTION}
                answer = await http.post(f"{other.base_url}/chat/completions", json=body)
                assert answer.status_code == status

        assert len(policy.turns) == (1 if name == "opponent" else 0)
        assert policy.failures


async def test_workflow_of_all_siblings_has_one_judge_and_a_role_for_each() -> None:
    trained, frozen = ScriptedModel([97, END], [98, END]), ScriptedModel([49, END])
    table = Table(trained, frozen)
    siblings = [table.policy, table.new_policy(SAMPLING)]
    seen: list[int] = []

    @group_workflow
    async def compare(prompt: Prompt, siblings: list[Policy], opponent: list[Policy], judge: Policy) -> list[Rewards]:
        for one in opponent:
            await one.chat(QUESTION)
        seen.append(len((await judge.chat(QUESTION)).token_ids))
        return [0.0, 1.0]

    model = FrozenModel(generator=frozen, codec=codec(), pool=ServerPool([], deadline_s=60.0))
    workflow = TaskWorkflow("compare", compare, SETTINGS, {"judge": model})

    assert await workflow(PROMPT, siblings) == [0.0, 1.0]
    assert [[turn.output_ids for turn in one.turns] for one in siblings] == [[[97, END]], [[98, END]]]
    assert seen == [2]


def test_role_is_greedy_in_evaluation_where_the_policy_is() -> None:
    own = PolicySettings(sampling=SamplingSettings(temperature=1.3, top_p=0.5, max_new_tokens=4))
    greedy = SAMPLING.model_copy(update={"temperature": 0.0})

    assert role_sampling(own, greedy) == greedy.model_copy(update={"max_new_tokens": 4})
    assert role_sampling(own, SAMPLING).temperature == 1.3


def write(root: Path, parameters: str) -> str:
    (root / "duel.py").write_text(f"async def duel({parameters}):\n    return 1.0\n")
    return "duel.py"


@pytest.mark.parametrize(
    ("parameters", "taken"),
    [
        ("prompt, policy", ()),
        ("prompt, policy, judge", ("judge",)),
        ("prompt, policy, *, judge, opponent", ("judge", "opponent")),
        ("prompt, policy, judge, nobody=None, tries=3", ("judge",)),
        ("prompt, policy, opponent=None", ("opponent",)),
    ],
)
def test_workflow_takes_policies_by_the_names_of_its_parameters(
    tmp_path: Path, parameters: str, taken: tuple[str, ...]
) -> None:
    workflow = load_workflow(write(tmp_path, parameters), root=tmp_path, policies=SETTINGS.policies)

    assert policies_taken(workflow, SETTINGS.policies) == taken


def test_workflow_that_needs_a_policy_that_is_not_there_is_refused_with_its_name(tmp_path: Path) -> None:
    spec = write(tmp_path, "prompt, policy, jugde")

    with pytest.raises(UserError, match="takes the policy 'jugde', the settings have .*'judge'.*; add policies.jugde"):
        load_workflow(spec, root=tmp_path, policies=SETTINGS.policies)
    with pytest.raises(UserError, match="takes the policy 'jugde', the settings have none"):
        load_workflow(spec, root=tmp_path)


def test_policy_that_nobody_takes_is_refused() -> None:
    with pytest.raises(UserError, match="policies.opponent: no workflow of this run takes it"):
        check_all_taken(SETTINGS.policies, {"judge"})
