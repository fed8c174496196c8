"""The endpoint: who may ask, which arm answers, what an answer says of itself, what is kept, and what is too much."""

import asyncio
import json
import socket
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import anyio
import httpx
import openai
import pytest
import structlog

from areal_async.errors import GenerationError, UserError
from areal_async.inference.pool import ServerHandle
from areal_async.protocol.types import Turn
from areal_async.rollout.endpoint.admission import AdmissionLimits
from areal_async.serving import app
from areal_async.serving.export import read_answers
from areal_async.serving.records import FEEDBACK, files_of
from areal_async.serving.server import _finish, _report, bound_socket, listening
from areal_async.telemetry.exporters.prometheus import metrics_app
from tests.brokers import until
from tests.unit.rollout.endpoint.scripted_endpoint import QUESTION, chat, said
from tests.unit.rollout.endpoint.test_images import shown
from tests.unit.rollout.seeing import seeing_codec
from tests.unit.serving import scripted
from tests.unit.serving.scripted import KEY, KEY_OF_BEN, NUM_TOKENS, Served, Stage, Voice, served

pytestmark = pytest.mark.anyio

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat(),
    RESPONSES: {"model": "m", "input": "hi"},
    MESSAGES: {"model": "m", "max_tokens": 9, "messages": QUESTION},
}
SPLIT = {"champion": 0.5, "candidate": 0.5}


def staged() -> Stage:
    return Stage({"champion": "1-1", "candidate": "1-2"})


def told_by(response: httpx.Response) -> tuple[str, str]:
    return response.headers["x-areal-arm"], response.headers["x-areal-version"]


def recorded(directory: Path) -> list[dict[str, Any]]:
    return list(read_answers(directory))


@pytest.mark.parametrize("path", [*BODIES, "/v1/models", "/v1/feedback", "/metrics", "/v1/elsewhere"])
async def test_without_a_key_nothing_is_told_but_that(path: str, tmp_path: Path) -> None:
    async with served(stage := staged(), tmp_path) as endpoint:
        for key in ("", "sk-wrong", KEY[:-1], KEY.upper()):
            headers = {"authorization": f"Bearer {key}"} if key else {"authorization": ""}
            refused = await endpoint.http.post(path, json=BODIES.get(path, {}), headers=headers)

            assert refused.status_code == 401
            error = refused.json()["error"]
            assert error.get("code", error["type"]) == (
                "authentication_error" if "messages" in path else "invalid_api_key"
            )
            assert refused.headers["www-authenticate"] == "Bearer"
            assert "x-areal-version" not in refused.headers
            assert "1-1" not in refused.text

    assert stage.voice("1-1").num_asked == 0


async def test_official_clients_are_answered_by_the_version_in_their_headers(tmp_path: Path) -> None:
    async with served(staged(), tmp_path) as endpoint:
        async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0) as client:
            raw = await client.chat.completions.with_raw_response.create(model="m", messages=QUESTION)
            whole = raw.parse()
            async with client.chat.completions.stream(model="m", messages=QUESTION) as stream:
                streamed = await stream.get_final_completion()
            responded = await client.responses.create(model="m", input="hi")
            models = [one.id async for one in client.models.list()]
        async with anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=KEY_OF_BEN, max_retries=0) as other:
            message = await other.messages.create(model="m", max_tokens=9, messages=QUESTION)

    assert raw.headers["x-areal-version"] == whole.choices[0].message.content == "1-1"
    assert raw.headers["x-request-id"] == whole.id
    assert streamed.choices[0].message.content == responded.output_text == "1-1"
    assert message.content[0].text == "1-1"
    assert models == ["run", "champion"]
    rows = recorded(tmp_path)
    assert [row["id"] for row in rows] == [whole.id, streamed.id, responded.id, message.id]
    assert [row["key"] for row in rows] == ["ann", "ann", "ann", "ben"]
    assert KEY not in json.dumps(rows)


async def test_a_record_has_what_was_said_token_for_token_and_by_whom(tmp_path: Path) -> None:
    about = chat(n=2, temperature=0.5, user="ann@example.org")
    async with served(staged(), tmp_path) as endpoint:
        answered = await endpoint.http.post(CHAT, json=about)

    rows = recorded(tmp_path)
    assert [row["choice"] for row in rows] == [0, 1]
    row = rows[0]
    assert row["id"] == answered.json()["id"]
    assert (row["arm"], row["version"], row["assigned"]) == ("champion", "1-1", "session")
    assert (row["messages"], row["completion"], row["temperature"]) == (QUESTION, "1-1", 0.5)
    assert (row["num_tokens"], row["num_prompt_tokens"]) == (NUM_TOKENS, len(row["prompt_ids"]))
    assert len(row["token_ids"]) == len(row["logprobs"]) == NUM_TOKENS
    assert "example.org" not in json.dumps(rows)
    assert row["session"] == rows[1]["session"] != ""


@pytest.mark.parametrize("record", ["text", "nothing"])
async def test_less_is_recorded_where_less_is_asked_for(record: str, tmp_path: Path) -> None:
    async with served(staged(), tmp_path, record=record) as endpoint:
        answered = await endpoint.http.post(CHAT, json=chat())
        await endpoint.http.post("/feedback", json={"id": answered.json()["id"], "reward": 1})

    rows = recorded(tmp_path)
    assert [(row["completion"], row["token_ids"], row["logprobs"]) for row in rows] == [("1-1", [], [])] * (
        record == "text"
    )
    assert len(files_of(tmp_path, FEEDBACK)) == 1


async def test_traffic_is_split_and_a_session_stays_with_its_arm(tmp_path: Path) -> None:
    async with served(staged(), tmp_path, split=SPLIT) as endpoint:

        async def ask(**about: Any) -> tuple[str, str]:
            headers = about.pop("headers", {})
            return told_by(await endpoint.http.post(CHAT, json=chat(**about), headers=headers))

        by_user = {user: {await ask(user=user) for _ in range(3)} for user in map(str, range(20))}
        by_header = {await ask(user=str(number), headers={"x-areal-session": "one"}) for number in range(8)}
        of_nobody = Counter([await ask() for _ in range(60)])
        named = {arm: {await ask(model=arm, user=str(number)) for number in range(8)} for arm in SPLIT}

    assert all(len(arms) == 1 for arms in by_user.values())
    both = {("champion", "1-1"), ("candidate", "1-2")}
    assert set.union(*by_user.values()) == both
    assert len(by_header) == 1, "the header goes before the field"
    assert of_nobody.keys() == both
    assert named == {"champion": {("champion", "1-1")}, "candidate": {("candidate", "1-2")}}
    assert Counter(row["assigned"] for row in recorded(tmp_path)) == {"session": 68, "share": 60, "model": 16}
    assert {row["completion"] for row in recorded(tmp_path) if row["arm"] == "candidate"} == {"1-2"}


async def test_the_arms_are_listed_with_their_versions(tmp_path: Path) -> None:
    async with served(staged(), tmp_path, split=SPLIT) as endpoint:
        listed = (await endpoint.http.get("/v1/models")).json()["data"]
        one = (await endpoint.http.get("/v1/models/candidate")).json()
        other = (await endpoint.http.get("/models/any")).json()

    assert [(model["id"], model.get("version"), model.get("share")) for model in listed] == [
        ("run", None, None), ("champion", "1-1", 0.5), ("candidate", "1-2", 0.5),
    ]  # fmt: skip
    assert (one["version"], other["id"]) == ("1-2", "any")


async def test_streams_go_on_through_moves_and_none_has_two_versions(tmp_path: Path) -> None:
    stage = staged()
    async with served(stage, tmp_path) as endpoint, anyio.create_task_group() as asking:
        answers: list[tuple[str, str]] = []

        async def stream() -> None:
            async with endpoint.http.stream("POST", CHAT, json=chat(stream=True)) as response:
                text = (await response.aread()).decode()
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            assert text.endswith("data: [DONE]\n\n")
            said = "".join(choice["delta"].get("content") or "" for one in events for choice in one["choices"])
            answers.append((response.headers["x-areal-version"], said))

        for number in range(1, 6):
            voice = stage.voice(f"1-{number}")
            end = voice.hold()
            for _ in range(4):
                asking.start_soon(stream)
            await until(lambda voice=voice: voice.num_asked >= 4)
            stage.meant["champion"] = after = f"1-{number + 1}"
            await until(lambda after=after: endpoint.arms[0].version == after)
            end.set()

    assert sorted(answers) == sorted([(f"1-{number}", f"1-{number}") for number in range(1, 6)] * 4)
    assert endpoint.app.counts.num_mixed == 0


async def test_tokens_of_another_version_are_noticed(tmp_path: Path) -> None:
    stage = staged()
    async with served(stage, tmp_path) as endpoint:
        await endpoint.http.post(CHAT, json=chat())
        assert endpoint.app.counts.num_mixed == 0
        stage.voice("1-1").stamps = ["1-1", "1-2"]
        await endpoint.http.post(CHAT, json=chat())

    assert endpoint.app.counts.num_mixed == 1


async def test_feedback_joins_its_answer(tmp_path: Path) -> None:
    async with served(staged(), tmp_path) as endpoint:
        answer_id = (await endpoint.http.post(CHAT, json=chat(n=2))).json()["id"]
        given = [
            {"id": answer_id, "reward": 0.25, "comment": "meh"},
            {"id": answer_id, "choice": 1, "rating": 5},
            {"id": f"chatcmpl-{'0' * 24}", "reward": 1},
        ]
        said = [(await endpoint.http.post("/v1/feedback", json=one)).json() for one in given]
        of_ben = {"authorization": f"Bearer {KEY_OF_BEN}"}
        said.append((await endpoint.http.post("/v1/feedback", json=given[0] | {"reward": 9}, headers=of_ben)).json())

    assert [one["is_known"] for one in said] == [True, True, False, False], "the last is somebody else's"
    assert [(row["reward"], row["rating"], row["comment"]) for row in recorded(tmp_path)] == [
        (0.25, None, "meh"), (1.0, 5, None),
    ]  # fmt: skip
    assert "ann" in files_of(tmp_path, FEEDBACK)[0].read_text()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "got what is no JSON object, need an object with the id of an answer, and"),
        (b"[" * 5000, "feedback: need an object with the id of an answer, and"),
        (b"[]", "feedback: need an object with the id of an answer, and"),
        (b'{"rating": 1}', "got no id, need the id of an answer"),
        (b'{"id": "x", "reward": 1}', "id: need the id of an answer, as its body and its header x-request-id have it"),
        (b'{"id": "%s", "reward": 1}' % (b"x" * 9000), "id: need the id of an answer"),
        (b'{"id": "msg_%s"}' % (b"0" * 24), "need a reward, a rating from 1 to 5 or a comment"),
        (b'{"id": "msg_%s", "reward": 1e9}' % (b"0" * 24), "reward: need a number from -1000000 to 1000000"),
        (b'{"id": "msg_%s", "reward": NaN}' % (b"0" * 24), "no JSON object"),
        (b'{"id": "msg_%s", "reward": "much"}' % (b"0" * 24), "reward: need a number"),
        (b'{"id": "msg_%s", "rating": 6}' % (b"0" * 24), "rating: need a whole number from 1 to 5"),
        (b'{"id": "msg_%s", "choice": 64, "rating": 1}' % (b"0" * 24), "choice: need a whole number from 0 to 63"),
        (b'{"id": "msg_%s", "comment": "%s"}' % (b"0" * 24, b"x" * 5000), "comment: need 1 to 4096 characters"),
        (b'{"id": "msg_%s", "rating": 1, "key": 1}' % (b"0" * 24), "got the field 'key', need no other than id,"),
        (b'{"id": "msg_%s", "\\u001b%s": 1}' % (b"0" * 24, b"x" * 9000), "got the field '\\\\x1bxx"),
    ],
)
async def test_what_is_no_feedback_is_refused(body: bytes, why: str, tmp_path: Path) -> None:
    async with served(staged(), tmp_path) as endpoint:
        refused = await endpoint.http.post("/feedback", content=body)
        too_long = await endpoint.http.post("/feedback", content=b" " * (64 << 10))

    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert why in message
    assert len(message) < 400
    assert too_long.status_code == 413
    assert not files_of(tmp_path, FEEDBACK)


async def test_what_is_too_much_is_told_when_to_come_again_and_the_rest_is_answered(tmp_path: Path) -> None:
    stage = staged()
    async with served(stage, tmp_path, max_requests=5) as endpoint:
        voice = stage.voice("1-1")
        end = voice.hold()
        waiting = [asyncio.create_task(endpoint.http.post(CHAT, json=chat(n=n))) for n in (2, 1)]
        await until(lambda: voice.num_asked >= 3)
        busy = await endpoint.http.post(CHAT, json=chat())
        end.set()
        answered = [await one for one in waiting]
        many = await endpoint.http.post(CHAT, json=chat(n=4))
        after = await endpoint.http.post(CHAT, json=chat(n=3))

    assert (busy.status_code, busy.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(busy.headers["retry-after"]) > 0
    assert busy.headers["x-should-retry"] == "true"
    assert [one.status_code for one in answered] == [200, 200]
    assert (many.status_code, after.status_code) == (429, 200)
    assert endpoint.app.num_answers == 0


async def test_a_key_leaves_room_for_others_and_has_all_of_it_where_it_is_alone(tmp_path: Path) -> None:
    stage = staged()
    of_ben = {"authorization": f"Bearer {KEY_OF_BEN}"}
    async with served(stage, tmp_path, max_requests=5) as endpoint, anyio.create_task_group() as asking:
        voice, answered = stage.voice("1-1"), []
        end = voice.hold()

        async def ask(**options: Any) -> None:
            answered.append((await endpoint.http.post(CHAT, json=chat(), **options)).status_code)

        for _ in range(3):
            asking.start_soon(ask)
        await until(lambda: voice.num_asked == 3)
        greedy = await endpoint.http.post(CHAT, json=chat())
        several = await endpoint.http.post(CHAT, json=chat(n=3), headers=of_ben)
        asking.start_soon(partial(ask, headers=of_ben))
        await until(lambda: voice.num_asked == 4)
        (tmp_path / "keys").write_text(f"ann {KEY}\n")
        endpoint.app._keyring.refresh()
        asking.start_soon(ask)
        await until(lambda: voice.num_asked == 5)
        end.set()

    assert (greedy.status_code, several.status_code) == (429, 429)
    assert "3 of this key and 3 of 5 in all" in greedy.json()["error"]["message"]
    assert answered == [200] * 5
    assert not endpoint.app._num_of_key


async def test_a_body_that_is_too_long_is_refused(tmp_path: Path) -> None:
    limits = AdmissionLimits(max_body_bytes=1000, max_short_bytes=500, max_share_bytes=1000, max_held_bytes=1000)
    async with served(staged(), tmp_path, limits=limits) as endpoint:
        refused = await endpoint.http.post(CHAT, json=chat(user="x" * 1000))

    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_has_a_deadline_and_says_so(is_streamed: bool, tmp_path: Path) -> None:
    stage = staged()
    async with served(stage, tmp_path, request_deadline_s=0.3) as endpoint:
        end = stage.voice("1-1").hold()
        late = await endpoint.http.post(CHAT, json=chat(stream=is_streamed))
        end.set()

    assert late.status_code == (200 if is_streamed else 503)
    assert "serve.request_deadline_s = 0.3 s" in late.text
    assert late.text.endswith("data: [DONE]\n\n") or not is_streamed
    assert endpoint.app.counts.requests["champion", "1-1", "unavailable"] == 1
    assert recorded(tmp_path) == []


class Flood(Voice):
    """Says more than the sockets hold, and goes on."""

    async def generate(self, *args: Any, on_tokens: Any, **_: Any) -> tuple[Turn, ServerHandle]:
        for _ in range(8):
            on_tokens(said("x")[:1] * 20_000)
            await anyio.sleep(0.01)
        await anyio.sleep_forever()
        raise AssertionError


async def test_a_client_that_hardly_reads_keeps_no_place_beyond_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bound(host: str, port: int) -> socket.socket:
        one = bound_socket(host, port)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return one

    monkeypatch.setattr(scripted, "bound_socket", bound)
    monkeypatch.setattr(app, "LATE_END_S", 0.1)
    stage = staged()
    stage.voices["1-1"] = Flood("1-1")
    body = json.dumps(chat(stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
    async with served(stage, tmp_path, request_deadline_s=1.0) as endpoint:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(endpoint.url.rpartition(":")[2])))
            client.sendall(head.encode() + body)
            await until(lambda: endpoint.app.num_answers == 1)
            await until(lambda: endpoint.app.num_answers == 0)


async def test_a_client_that_leaves_is_not_answered_any_more(tmp_path: Path) -> None:
    stage = staged()
    async with served(stage, tmp_path) as endpoint:
        stage.voice("1-1").hold()
        async with endpoint.http.stream("POST", CHAT, json=chat(stream=True)) as response:
            await anext(response.aiter_bytes())
        await until(lambda: not endpoint.app.num_answers)

    assert recorded(tmp_path) == []


class Failing(Voice):
    """Breaks after its first letter."""

    async def generate(self, *args: Any, **options: Any) -> tuple[Turn, ServerHandle]:
        if options.get("on_tokens"):
            options["on_tokens"]([5])
        raise GenerationError("generation: 6 streams in a row gave no new token")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_servers_that_fail_are_one_error(is_streamed: bool, tmp_path: Path) -> None:
    stage = staged()
    stage.voices["1-1"] = Failing("1-1")
    async with served(stage, tmp_path) as endpoint:
        failed = await endpoint.http.post(CHAT, json=chat(stream=is_streamed))

        feedback = {"id": failed.headers["x-request-id"], "reward": 0}
        said = (await endpoint.http.post("/feedback", json=feedback)).json()

    assert failed.status_code == (200 if is_streamed else 503)
    assert said["is_known"] is False
    assert failed.text.count("6 streams in a row") == 1
    assert failed.headers["x-areal-version"] == "1-1"
    assert recorded(tmp_path) == []
    assert sum(endpoint.app.counts.requests.values()) == 1
    assert ("champion", "1-1", "answered") not in endpoint.app.counts.requests


async def test_a_model_that_sees_is_shown_images_whose_hashes_are_kept(tmp_path: Path) -> None:
    stage = Stage({"champion": "1-1"}, codec=seeing_codec())
    async with served(stage, tmp_path) as endpoint:
        answered = await endpoint.http.post(CHAT, json={"model": "m", "messages": [shown("red")]})

    assert answered.json()["choices"][0]["message"]["content"] == "1-1"
    assert stage.voice("1-1").num_seen == [1]
    (row,) = recorded(tmp_path)
    assert row["messages"] == [{"role": "user", "content": "What is it?\n[image]"}]
    assert len(row["images"][0]) == 64
    assert "base64" not in json.dumps(row)


async def test_a_mistake_of_ours_after_an_answer_is_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(staged(), tmp_path) as endpoint:
        monkeypatch.setattr(endpoint.recorder, "note", lambda *_: 1 / 0)
        with structlog.testing.capture_logs() as logs:
            answered = await endpoint.http.post(CHAT, json=chat())
            await until(lambda: not endpoint.app.num_answers)

    assert answered.status_code == 200
    assert [line["cause"] for line in logs if line["event"] == "serve.failed"] == [
        "ZeroDivisionError: division by zero"
    ]


async def test_who_listens_at_the_port_meanwhile_is_told_of(tmp_path: Path) -> None:
    with bound_socket("127.0.0.1", 0) as bound, bound_socket("127.0.0.1", bound.getsockname()[1]) as other:
        other.listen()
        with pytest.raises(UserError, match=r"serve\.port: got \d+, need a port at which nobody else listens"):
            async with listening(None, bound, AdmissionLimits()):
                pass


async def test_health_and_metrics(tmp_path: Path) -> None:
    async with served(staged(), tmp_path) as endpoint, httpx.AsyncClient(base_url=endpoint.url) as anybody:
        endpoint.app.metrics = metrics_app(
            tmp_path, role="serve", report=lambda: _report(endpoint.app, endpoint.arms, endpoint.recorder)
        )
        await endpoint.http.post(CHAT, json=chat())
        well = await anybody.get("/health")
        numbers = (await endpoint.http.get("/metrics")).text
        endpoint.app.is_closing = True
        ending = await anybody.get("/health")
        refused = await endpoint.http.post(CHAT, json=chat())

    assert (well.status_code, well.json()) == (200, {"status": "ok"})
    assert 'areal_serve_requests_total{arm="champion",outcome="answered",version="1-1"} 1.0' in numbers
    assert f'areal_serve_tokens_total{{arm="champion",version="1-1"}} {NUM_TOKENS}.0' in numbers
    assert 'areal_server_weights_step{policy="champion",server="s0"} 1.0' in numbers
    assert (ending.status_code, refused.status_code) == (503, 503)
    assert int(refused.headers["retry-after"]) > 0


async def test_what_has_begun_when_it_ends_is_ended_within_a_deadline(tmp_path: Path) -> None:
    stage, told = staged(), []

    async def ask(endpoint: Served) -> list[httpx.Response]:
        end = stage.voice("1-1").hold()
        asking = [asyncio.create_task(endpoint.http.post(CHAT, json=chat())) for _ in range(2)]
        await until(lambda: endpoint.app.num_answers >= 2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_finish, endpoint.app, deadline_s, told.append)
            await anyio.sleep(0.05)
            if deadline_s > 1:
                end.set()
        return [await one for one in asking]

    async with served(stage, tmp_path) as endpoint:
        deadline_s = 100.0
        finished = await ask(endpoint)
        endpoint.app.is_closing, deadline_s = False, 0.1
        cut_off = await ask(endpoint)

    assert [one.status_code for one in finished] == [200, 200]
    assert [(one.status_code, "ended before the answer" in one.text) for one in cut_off] == [(503, True)] * 2
    assert told[-1] == "2 answers were cut off after 0.1 s"
