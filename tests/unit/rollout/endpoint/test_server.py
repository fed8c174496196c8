"""A key is good for its own trajectory, for as long as that lives, and every error has the shape of its API."""

import gc
import json
import signal
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest
import structlog

from areal_async.config.settings import SamplingSettings
from areal_async.errors import GenerationError, Reject, UserError, WorkflowError
from areal_async.inference.pool import ServerHandle
from areal_async.protocol.types import Prompt, Turn
from areal_async.rollout.endpoint.policy import PolicyMaker
from areal_async.rollout.endpoint.server import AgentEndpoint
from areal_async.rollout.policy.generation import Generator
from areal_async.rollout.rewards.reply_rewards import Ending, Scores
from areal_async.telemetry import tracing
from areal_async.vision.images import Image
from tests.unit.rollout.byte_model import ScriptedModel
from tests.unit.rollout.called import call_of
from tests.unit.rollout.chat_templates import TINY, codec_with
from tests.unit.rollout.endpoint.scripted_endpoint import QUESTION, chat, client, said, served, speaker

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

PROMPT = Prompt(epoch=0, index=0, row={})
CHAT, RESPONSES, MESSAGES = "/chat/completions", "/v1/responses", "/v1/messages"
BODIES = {
    CHAT: chat(),
    RESPONSES: {"model": "m", "input": "hi"},
    MESSAGES: {"model": "m", "max_tokens": 9, "messages": QUESTION},
}


class Waiting(ScriptedModel):
    """Says one letter and then nothing; tells of being asked and of being left."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = anyio.Event()
        self.is_left = anyio.Event()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        *,
        preferred: ServerHandle | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
        images: Sequence[Image] = (),
    ) -> tuple[Turn, ServerHandle]:
        self.is_asked.set()
        if on_tokens:
            on_tokens(said("a")[:1])
        try:
            await anyio.sleep_forever()
        finally:
            self.is_left.set()
        raise AssertionError


class Failing(ScriptedModel):
    """Raises what it is given, one after the other, before it answers."""

    def __init__(self, *errors: str, answers: tuple[str, ...] = ()) -> None:
        super().__init__(*(said(text) for text in answers))
        self.errors = list(errors)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        *,
        preferred: ServerHandle | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
        images: Sequence[Image] = (),
    ) -> tuple[Turn, ServerHandle]:
        await anyio.lowlevel.checkpoint()
        if self.errors:
            raise GenerationError(self.errors.pop(0))
        return await super().generate(
            prompt_ids, sampling_params, preferred=preferred, on_tokens=on_tokens, images=images
        )


async def test_nothing_runs_until_a_workflow_asks_for_the_address() -> None:
    async with AgentEndpoint() as endpoint:
        maker = PolicyMaker(generator=speaker(), codec=codec_with("hermes"), endpoint=endpoint)
        policy = maker.policy(SamplingSettings(), "uid")

        assert not endpoint.is_serving
        assert policy.base_url.startswith("http://127.0.0.1:")
        assert endpoint.is_serving
    assert not endpoint.is_serving


async def test_a_traced_client_of_an_agent_is_what_its_completion_is_made_for() -> None:
    """It is told by W3C's header, whose trace the server goes on with."""

    class Traced(ScriptedModel):
        async def generate(self, *args: Any, **options: Any) -> tuple[Turn, ServerHandle]:
            seen.append(tracing.headers())
            return await super().generate(*args, **options)

    seen: list[dict[str, str]] = []
    header = {"traceparent": f"00-{7:032x}-{8:016x}-01"}
    async with served(Traced(said("hi"), said("hi"))) as policy, client(policy) as http:
        for headers in (header, {}):
            assert (await http.post(CHAT, json=chat(), headers=headers)).status_code == 200

    assert seen == [header, {}]


async def test_signals_stay_with_the_node_and_the_port_is_free_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    async with served(speaker("hi")) as policy, client(policy) as http:
        assert (await http.post(CHAT, json=chat())).status_code == 200
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
        url = policy.base_url

    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient(trust_env=False) as http:
            await http.get(f"{url}/models")


@pytest.mark.parametrize("path", [CHAT, "/v1/chat/completions", "/responses", RESPONSES, "/messages", MESSAGES])
async def test_both_sdks_find_their_paths_below_one_base_url(path: str) -> None:
    body = BODIES[path if path in BODIES else f"/v1{path}" if f"/v1{path}" in BODIES else CHAT]

    async with served(speaker("hi")) as policy, client(policy) as http:
        assert (await http.post(path, json=body)).status_code == 200
        assert len(policy.turns) == 1


async def test_models_are_listed_and_any_name_is_one() -> None:
    async with served(speaker()) as policy, client(policy) as http:
        for path in ("/models", "/v1/models"):
            assert [model["id"] for model in (await http.get(path)).json()["data"]] == [str(TINY)]
        one = (await http.get("/v1/models/some/name")).json()
        assert (one["id"], one["object"], one["root"]) == ("some/name", "model", str(TINY))
        assert (await http.get("/modelsx")).status_code == 404


async def test_endpoint_listens_where_it_is_told_to_and_names_that_address() -> None:
    async with served(speaker("hi"), host="127.0.0.2") as policy, client(policy) as http:
        assert policy.base_url.startswith("http://127.0.0.2:")
        assert (await http.post(CHAT, json=chat())).status_code == 200
        async with client(policy, authorization="Bearer sk-wrong") as stranger:
            assert_unauthorized(await stranger.post(CHAT, json=chat()), CHAT)
        # Not 127.0.0.1: another's server may have this port there.
        elsewhere = policy.base_url.replace("127.0.0.2", "127.0.0.3")
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{elsewhere}/models")


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "::1", "no such host"])
async def test_address_that_is_none_of_this_host_s_is_refused_at_once(host: str) -> None:
    with pytest.raises(UserError, match=r"endpoint\.host: got .*, need an IPv4 address or a name of this host"):
        async with served(speaker(), host=host):
            pass


@pytest.mark.parametrize("path", BODIES)
async def test_key_is_good_for_its_own_trajectory_alone_and_ends_with_it(path: str) -> None:
    async with AgentEndpoint() as endpoint:
        mine, other = (
            PolicyMaker(generator=speaker("hi"), codec=codec_with("hermes"), endpoint=endpoint).policy(
                SamplingSettings(), name
            )
            for name in ("mine", "other")
        )
        assert (mine.api_key, mine.base_url) != (other.api_key, other.base_url)
        for headers in (
            {"authorization": f"Bearer {other.api_key}"},
            {"x-api-key": other.api_key},
            {"authorization": mine.api_key},
            {"authorization": "Bearer"},
            {"x-api-key": b"\xe9"},
            {"accept": "*/*"},
        ):
            async with client(mine, **headers) as http:
                assert_unauthorized(await http.post(path, json=BODIES[path]), path)
        for headers in ({"authorization": f"bearer {mine.api_key}"}, {"x-api-key": mine.api_key}):
            async with client(mine, **headers) as http:
                assert (await http.get("/models")).status_code == 200
        async with client(mine) as http:
            mine.close()
            assert_unauthorized(await http.post(path, json=BODIES[path]), path)
        assert mine.turns == other.turns == []


@pytest.mark.parametrize(("fields", "status"), [({}, 200), ({"stream": True}, 200), ({"temperature": -1}, 400)])
async def test_trajectory_that_has_ended_is_not_left_to_the_garbage_collector(
    fields: dict[str, Any], status: int
) -> None:
    async with AgentEndpoint() as endpoint:
        maker = PolicyMaker(generator=speaker("hi"), codec=codec_with("hermes"), endpoint=endpoint)
        policy = maker.policy(SamplingSettings(), "uid")
        async with client(policy) as http:
            assert (await http.post(CHAT, json=chat(**fields))).status_code == status
        is_gone = anyio.Event()
        left = weakref.ref(policy, lambda _: is_gone.set())
        gc.disable()
        try:
            policy.close()
            del policy
            with anyio.move_on_after(10):  # uvicorn has a connection's last request until that is closed
                await is_gone.wait()
            assert left() is None
        finally:
            gc.enable()


async def test_address_is_not_made_after_the_end_and_stays_what_it_was() -> None:
    async with AgentEndpoint() as endpoint:
        maker = PolicyMaker(generator=speaker(), codec=codec_with("hermes"), endpoint=endpoint)
        asked, unasked = (maker.policy(SamplingSettings(), name) for name in ("asked", "unasked"))
        address = (asked.base_url, asked.api_key)
        for policy in (asked, unasked):
            policy.close()
        assert (asked.base_url, asked.api_key) == address
        with pytest.raises(WorkflowError, match="after the end of its trajectory"):
            _ = unasked.base_url
        with pytest.raises(WorkflowError, match="after the end of its trajectory"):
            _ = unasked.api_key


def assert_unauthorized(response: httpx.Response, path: str) -> None:
    assert response.status_code == 401
    assert response.headers["x-should-retry"] == "false"
    error = response.json()["error"]
    assert (error["type"] if path == MESSAGES else error["code"]) == (
        "authentication_error" if path == MESSAGES else "invalid_api_key"
    )


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_generation_ends_with_the_trajectory(path: str, is_streamed: bool) -> None:
    model = Waiting()
    responses: list[httpx.Response] = []
    async with served(model) as policy, client(policy) as http:

        async def ask() -> None:
            try:
                responses.append(await http.post(path, json=BODIES[path] | {"stream": is_streamed}))
            except httpx.RemoteProtocolError:
                pass  # what had begun is left without its end

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await model.is_asked.wait()
                policy.close()
                await model.is_left.wait()
    assert policy.turns == []
    for response in responses:
        assert_unauthorized(response, path)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_generation_ends_when_its_client_leaves(is_streamed: bool) -> None:
    model = Waiting()
    async with served(model) as policy, client(policy) as http:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    await http.post(CHAT, json=chat(stream=is_streamed))

                tasks.start_soon(ask)
                await model.is_asked.wait()
                tasks.cancel_scope.cancel()
            await model.is_left.wait()
        assert policy.turns == []
        assert not policy.failures


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (
            "generation: 6 streams in a row gave no new token",
            {CHAT: 503, RESPONSES: 503, MESSAGES: 529},
            "service_unavailable",
        ),
        (
            "generation: refused with status 400: longer than the context length of 512",
            {CHAT: 400, RESPONSES: 400, MESSAGES: 400},
            "context_length_exceeded",
        ),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_failure_of_the_policy_is_an_error_of_the_api(
    path: str, is_streamed: bool, reason: str, status: Mapping[str, int], code: str | None
) -> None:
    async with served(Failing(reason)) as policy, client(policy) as http:
        response = await http.post(path, json=BODIES[path] | {"stream": is_streamed})

        assert response.status_code == status[path]
        assert response.json()["error"]["message"] == reason
        if path != MESSAGES:
            assert response.json()["error"]["code"] == code
        assert str(policy.failures[0]) == reason


@pytest.mark.parametrize("path", BODIES)
async def test_stream_that_breaks_ends_with_an_error_of_the_api(path: str) -> None:
    class Breaking(Failing):
        async def generate(self, *args: Any, on_tokens: Any = None, **kwargs: Any) -> tuple[Turn, ServerHandle]:
            on_tokens(said("ab")[:2])
            await anyio.wait_all_tasks_blocked()
            raise GenerationError("gone")

    async with served(Breaking()) as policy, client(policy) as http:
        response = await http.post(path, json=BODIES[path] | {"stream": True})

        assert response.status_code == 200
        last = [line for line in response.text.splitlines() if line.startswith("data: {")][-1]
        event = json.loads(last.removeprefix("data: "))
        error = event["response"]["error"] if path == RESPONSES else event["error"]
        assert error["message"] == "gone"
        assert policy.turns == []


async def ending_of(agent: Callable[[httpx.AsyncClient], Awaitable[float]], model: Generator) -> Ending:
    """Return how a workflow ends that hands its address to an agent."""
    async with served(model) as policy, client(policy) as http:

        async def workflow(prompt: Prompt, policy: object) -> float:
            return await agent(http)

        (ending,) = await call_of(workflow, [policy]).endings(PROMPT)
    return ending


async def test_trajectory_fails_with_what_its_agent_was_denied_last() -> None:
    async def agent(http: httpx.AsyncClient) -> float:
        await http.post(CHAT, json=chat())
        return 1.0

    async def patient(http: httpx.AsyncClient) -> float:
        await agent(http)
        return await agent(http)

    async def stubborn(http: httpx.AsyncClient) -> float:
        await agent(http)
        raise ValueError("the agent ended with status 1")

    async def withdrawn(http: httpx.AsyncClient) -> float:
        await agent(http)
        raise Reject("no")

    denied, stopped = await ending_of(agent, Failing("gone")), await ending_of(stubborn, Failing("gone"))

    assert isinstance(denied, GenerationError)
    assert str(denied) == str(stopped) == "gone"
    assert "status 1" in str(stopped.__cause__)  # type: ignore[union-attr]
    assert isinstance(await ending_of(withdrawn, Failing("gone")), Reject)
    assert await ending_of(patient, Failing("gone", answers=("hi",))) == Scores(1.0), "an answer after it makes it good"


async def test_trajectory_fails_with_what_its_agent_was_refused_last() -> None:
    async def agent(http: httpx.AsyncClient) -> float:
        await http.post(CHAT, json=chat(seed=1))
        return 0.0

    async def patient(http: httpx.AsyncClient) -> float:
        await agent(http)
        await http.post(CHAT, json=chat())
        return 0.0

    refused = await ending_of(agent, speaker("hi"))

    assert isinstance(refused, WorkflowError)
    assert "refused a request of the agent: seed: " in str(refused)
    assert await ending_of(patient, speaker("hi")) == Scores(0.0), "an answer after it makes it good"


async def test_call_that_cannot_be_forced_is_denied_as_well() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    async with served(speaker("hi"), call_parser=Unasked()) as policy, client(policy) as http:
        for is_streamed in (False, True):
            response = await http.post(CHAT, json=chat(tools=tools, tool_choice="required", stream=is_streamed))
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "tool_choice"
            assert "tool_call_parser" in str(policy.failures[0])
        assert policy.turns == []


class Unasked:
    """A servers' parser that nobody asks."""

    async def find(self, *args: Any, **options: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize("path", BODIES)
async def test_fields_that_cannot_be_had_are_left_out_of_account_where_that_was_asked_for(path: str) -> None:
    model = speaker("hi", "ho")
    with structlog.testing.capture_logs() as logs:
        async with served(model, on_unsupported="warn") as policy, client(policy) as http:
            for _ in range(2):
                response = await http.post(path, json=BODIES[path] | {"seed": 1, "new_thing": 2})
                assert response.status_code == 200
            assert not policy.failures

    told = [(line["event"], line.get("field"), line.get("num_times")) for line in logs if "field" in line["event"]]
    assert told == [
        ("endpoint.field_left_out", "seed", None),
        ("endpoint.field_left_out", "new_thing", None),
        ("endpoint.fields_left_out", None, {"seed": 2, "new_thing": 2}),
    ]


async def test_workflow_that_raises_by_itself_keeps_its_own_cause() -> None:
    async def broken(http: httpx.AsyncClient) -> float:
        raise ValueError("mine")

    assert str(await ending_of(broken, speaker())) == "workflow w: ValueError: mine"


async def test_request_runs_in_the_name_of_its_workflow() -> None:
    seen: list[dict[str, Any]] = []

    class Watched(ScriptedModel):
        async def generate(self, *args: Any, **kwargs: Any) -> tuple[Turn, ServerHandle]:
            seen.append(structlog.contextvars.get_contextvars())
            return await super().generate(*args, **kwargs)

    async with served(Watched(said("a"), said("b"))) as policy:
        with structlog.contextvars.bound_contextvars(sample_uid="uid"):
            async with client(policy) as http:
                await http.post(CHAT, json=chat())
        async with client(policy) as http:
            await http.post(CHAT, json=chat(stream=True))

    assert seen == [{"sample_uid": "uid"}] * 2


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("POST", "/models", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/", 404),
    ],
)
async def test_what_is_not_served_is_said_so(method: str, path: str, status: int) -> None:
    async with served(speaker()) as policy, client(policy) as http:
        response = await http.request(method, path)

        assert response.status_code == status
        assert response.json()["error"]["message"]


async def test_mistake_of_ours_is_told_in_the_shape_of_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(speaker("hi")) as policy, client(policy) as http:
        monkeypatch.setattr(policy, "chat", None)
        response = await http.post(MESSAGES, json=BODIES[MESSAGES])

        assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")


async def test_asking_for_more_tokens_than_the_run_allows_is_asking_for_as_many_as_it_does() -> None:
    model = speaker("a", "b", "c")
    async with served(model, max_new_tokens=50) as policy, client(policy) as http:
        for max_tokens in (8192, 7, None):
            await http.post(CHAT, json=chat(max_tokens=max_tokens))

    assert [params["max_new_tokens"] for _, params in model.calls] == [50, 7, 50]
