"""What both servers make of penalties, biases and grammars, and of which distribution their logprobs are.

Of the one that was drawn from: the model's logits, changed as was asked, over the temperature. What ``min_p`` cuts away
is in no logprob, as with ``top_p`` and ``top_k``.
"""

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from areal_async.errors import GenerationError
from areal_async.inference.client import InferenceClient
from areal_async.inference.http import ServerApi
from areal_async.inference.supervision.swap import swap as order_swap
from areal_async.protocol.types import Turn, WeightsVersion
from tests.sglang.test_client import anyio_backend as anyio_backend
from tests.sglang.test_client import client_of
from tests.sglang.test_contract import swap
from tests.unit.inference.embedded_engine import (
    ALPHABET,
    EOS_ID,
    FIRST_BYTE_ID,
    VOCAB_SIZE,
    Server,
    body,
    prompt_of,
    reference_distribution,
    reference_logits,
)

pytestmark = pytest.mark.timeout(900)

TOLERANCE = 1e-4
TEMPERATURE = 0.7
NEVER = float("-inf")
DIGITS = [FIRST_BYTE_ID + ALPHABET.index(digit) for digit in "0123456789"]

Steer = Callable[[torch.Tensor, Sequence[int]], None]
"""Changes the logits [V] after so much of an answer."""


def steered(model: Path, prompt: Sequence[int], output: Sequence[int], steer: Steer) -> torch.Tensor:
    """Return the logprobs [len(output), V] of the changed logits at ``TEMPERATURE``."""
    logits = reference_logits(model, prompt, output)
    for index, row in enumerate(logits):
        steer(row, output[:index])
    return torch.log_softmax(logits / TEMPERATURE, dim=-1)


def logprobs_of(answer: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


def assert_drawn_from(distribution: torch.Tensor, answer: dict[str, Any]) -> None:
    expected = distribution.gather(1, torch.tensor(answer["output_ids"])[:, None])[:, 0]
    torch.testing.assert_close(logprobs_of(answer), expected, atol=TOLERANCE, rtol=0.0)


def penalise(*, frequency: float = 0.0, presence: float = 0.0, repetition: float = 1.0) -> Steer:
    def steer(logits_V: torch.Tensor, said: Sequence[int]) -> None:
        for token in set(said):
            logits_V[token] -= frequency * said.count(token) + presence
            logits_V[token] *= repetition if logits_V[token] < 0 else 1 / repetition

    return steer


def bias(biases: dict[int, float]) -> Steer:
    def steer(logits_V: torch.Tensor, said: Sequence[int]) -> None:
        for token, value in biases.items():
            logits_V[token] += value

    return steer


def allow(*steps: Sequence[int]) -> Steer:
    """Only these tokens, step by step."""

    def steer(logits_V: torch.Tensor, said: Sequence[int]) -> None:
        kept = logits_V[list(steps[len(said)])].clone()
        logits_V.fill_(NEVER)
        logits_V[list(steps[len(said)])] = kept

    return steer


def both(*steers: Steer) -> Steer:
    def steer(logits_V: torch.Tensor, said: Sequence[int]) -> None:
        for one in steers:
            one(logits_V, said)

    return steer


STEERED: list[tuple[dict[str, Any], Steer]] = [
    ({"frequency_penalty": 1.5}, penalise(frequency=1.5)),
    ({"presence_penalty": 2.0}, penalise(presence=2.0)),
    ({"frequency_penalty": -0.5, "presence_penalty": 0.3}, penalise(frequency=-0.5, presence=0.3)),
    ({"repetition_penalty": 1.8}, penalise(repetition=1.8)),
    ({"repetition_penalty": 0.5}, penalise(repetition=0.5)),
    ({"logit_bias": {"7": 6.0, "9": -100}}, bias({7: 6.0, 9: -100.0})),
    ({"regex": "[0-9]{30}"}, allow(*[DIGITS] * 30, [EOS_ID])),
    ({"regex": "[0-9]{30}", "frequency_penalty": 2.0}, both(penalise(frequency=2.0), allow(*[DIGITS] * 30, [EOS_ID]))),
    ({}, both()),
]


def test_logprobs_are_of_the_changed_logits_alone_and_beside_others(server: Server, models: list[Path]) -> None:
    """Each is asked for beside all others and one that asks for nothing: a row's change is no other's."""
    prompts = [prompt_of(12 + index, seed=index) for index in range(len(STEERED))]
    common = {"max_new_tokens": 40, "temperature": TEMPERATURE}
    params = [{**common, "ignore_eos": "regex" not in change, **change} for change, _ in STEERED]
    request = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}

    response = server.http.post("/generate", json=request)
    assert response.status_code == 200, response.text

    for prompt, answer, (change, steer) in zip(prompts, response.json(), STEERED, strict=True):
        assert len(answer["output_ids"]) == (31 if "regex" in change else 40), change
        assert_drawn_from(steered(models[0], prompt, answer["output_ids"], steer), answer)


def test_min_p_cuts_what_is_far_less_likely_and_leaves_no_trace_in_the_logprobs(
    server: Server, models: list[Path]
) -> None:
    prompt = prompt_of(12)

    answer = server.generate(prompt, max_new_tokens=60, temperature=1.5, min_p=0.3)

    distribution = reference_distribution(models[0], prompt, answer["output_ids"], temperature=1.5)
    assert_drawn_from(distribution, answer)
    least = distribution.max(dim=-1).values + torch.log(torch.tensor(0.3))
    assert (logprobs_of(answer) >= least - TOLERANCE).all()
    assert (logprobs_of(answer) < distribution.max(dim=-1).values - TOLERANCE).any(), "else it was greedy"


def test_no_answer_ends_before_its_min_new_tokens(server: Server, models: list[Path]) -> None:
    prompts, ends = [prompt_of(6, seed=seed) for seed in range(4)], [EOS_ID, *range(100, 200)]
    sampling = {"temperature": TEMPERATURE, "stop_token_ids": ends[1:], "max_new_tokens": 60}

    def ask(**more: Any) -> list[dict[str, Any]]:
        params = {**sampling, **more}
        request = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
        answers: list[dict[str, Any]] = server.http.post("/generate", json=request).json()
        return answers

    def held(logits_V: torch.Tensor, said: Sequence[int]) -> None:
        if len(said) < 10:
            logits_V[ends] = NEVER

    # Of four, not each: by chance one in ninety says ten tokens first.
    assert any(len(answer["output_ids"]) < 10 for answer in ask()), "else nothing would have ended before"
    for prompt, answer in zip(prompts, ask(min_new_tokens=10), strict=True):
        assert 10 < len(answer["output_ids"]) < 60
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": answer["output_ids"][-1]}
        assert_drawn_from(steered(models[0], prompt, answer["output_ids"], held), answer)


def test_the_likeliest_tokens_are_told_as_many_as_were_asked_for(server: Server, models: list[Path]) -> None:
    prompt, steer = prompt_of(9), penalise(presence=2.0)
    request = body(prompt, max_new_tokens=25, temperature=TEMPERATURE, presence_penalty=2.0) | {"top_logprobs_num": 3}

    answer = server.http.post("/generate", json=request).json()
    with server.http.stream("POST", "/generate", json={**request, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line and "[DONE]" not in line]
    events = [json.loads(line) for line in lines]
    streamed = {
        "output_ids": [id for event in events for id in event["output_ids"]],
        "meta_info": {
            "output_top_logprobs": [at for event in events for at in event["meta_info"]["output_top_logprobs"]]
        },
    }

    assert len(events) > 1
    for one in (answer, streamed):
        distribution = steered(models[0], prompt, one["output_ids"], steer)
        tops = one["meta_info"]["output_top_logprobs"]
        assert {len(at) for at in tops} == {3}
        expected = distribution.topk(3, dim=-1)
        assert [[id for _, id, _ in at] for at in tops] == expected.indices.tolist()
        torch.testing.assert_close(
            torch.tensor([[logprob for logprob, _, _ in at] for at in tops]), expected.values, atol=TOLERANCE, rtol=0.0
        )


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "size": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
CALL = {"begin": "<call>", "end": "</call>"}
GRAMMARS: list[tuple[dict[str, str], str]] = [
    ({"regex": "(yes|no)!{1,2}"}, r"(yes|no)!{1,2}"),
    ({"json_schema": json.dumps(SCHEMA)}, r'\{\s*"city"\s*:\s*"(Rome|Oslo)"\s*,\s*"size"\s*:\s*[1-9]\s*\}'),
    ({"ebnf": 'root ::= "a" tail\ntail ::= "b" | "c"'}, "a[bc]"),
    (
        {"structural_tag": json.dumps({
            "type": "structural_tag",
            "format": {"type": "tag", **CALL, "content": {"type": "json_schema", "json_schema": {"const": 5}}},
        })},
        "<call>5</call>",
    ),
    (
        {"structural_tag": json.dumps({
            "type": "structural_tag", "triggers": ["<call>"], "at_least_one": True,
            "structures": [{**CALL, "schema": {"const": 5}}],
        })},
        "<call>5</call>.*",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "pattern"), GRAMMARS, ids=lambda value: str(value)[:30])
def test_an_answer_keeps_to_its_grammar_and_ends_with_it(server: Server, grammar: dict[str, str], pattern: str) -> None:
    request = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 200, "temperature": 1.0, **grammar}}

    for answer in server.http.post("/generate", json=request).json():
        reason = answer["meta_info"]["finish_reason"]
        if reason["type"] == "stop":
            assert re.fullmatch(pattern, answer["text"], re.DOTALL), answer["text"]
            assert reason["matched"] == EOS_ID == answer["output_ids"][-1]
        else:  # whitespace and free text may go on for ever
            assert reason == {"type": "length", "length": 200}


def test_a_grammar_that_is_not_at_its_end_ends_by_length(server: Server) -> None:
    answer = server.generate(prompt_of(5), max_new_tokens=12, ignore_eos=False, regex="[0-9]+x{100}y")

    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert re.fullmatch("[0-9]+x*", answer["text"])


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"regex": "[0-9"}, "regex"),
        ({"json_schema": '{"type": "nonsense"}'}, "json"),
        ({"json_schema": "{"}, "json"),
        ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "uniqueItems"),
        ({"json_schema": '{"pattern": "\\u0000"}'}, "NUL"),
        ({"ebnf": "root ::= missing"}, "ebnf"),
        ({"structural_tag": '{"type": "structural_tag", "format": {"type": "nonsense"}}'}, "structural_tag"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "Only one of json_schema, regex, ebnf, or structural_tag"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens"),
        ({"min_p": 2}, "min_p"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_asked_answers_400_and_names_it(server: Server, bad: dict[str, Any], name: str) -> None:
    answer = server.http.post("/generate", json=body([5], **bad))

    assert answer.status_code == 400, answer.text
    assert name in answer.text


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_grammar_goes_on_where_it_was_when_the_weights_are_swapped(
    server: Server, models: list[Path], mode: str
) -> None:
    prompt = prompt_of(10)
    with server.stream(prompt, max_new_tokens=450, ignore_eos=False, regex="[0-9]{300}") as stream:
        stream.read(3)
        swap(server, models[1], "0-1", mode=mode)
        stream.read()

    assert re.fullmatch("[0-9]{300}", stream.text)
    assert stream.meta["finish_reason"] == {"type": "stop", "matched": EOS_ID}
    assert len(stream.meta["weight_versions"]) == 2
    answer = {"output_ids": stream.output_ids, "meta_info": {"output_token_logprobs": [[p] for p in stream.logprobs]}}
    if mode == "retract":
        old = stream.meta["weight_versions"][0]["end"]
        logits = [reference_logits(model, prompt, stream.output_ids) for model in models]
        logits_TV = torch.cat([logits[0][:old], logits[1][old:]])
        for index, row in enumerate(logits_TV):
            allow(*[DIGITS] * 300, [EOS_ID])(row, stream.output_ids[:index])
        assert_drawn_from(torch.log_softmax(logits_TV, dim=-1), answer)


async def generate_through(
    server: Server, event: Callable[[InferenceClient], Awaitable[None]], **sampling: Any
) -> tuple[Turn, list[int]]:
    """Generate while ``event`` happens in the midst of it; return the turn, and the tokens that were told."""
    told: list[int] = []
    turns: list[Turn] = []
    async with client_of(server) as client:
        known = client.pool.servers["s0"]

        async def generate() -> None:
            params = {"max_new_tokens": 450, "temperature": TEMPERATURE, "stop_token_ids": [EOS_ID], **sampling}
            turns.append((await client.generate(prompt_of(10), params, on_tokens=told.extend))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            while known.num_generated_tokens < 20:  # noqa: ASYNC110 -- a counter has no event
                await anyio.sleep(0.01)
            await event(client)
    return turns[0], told


@pytest.mark.anyio
async def test_an_answer_under_a_grammar_whose_stream_is_aborted_is_begun_anew(
    server: Server, models: list[Path]
) -> None:
    async def change(client: InferenceClient) -> None:
        known = client.pool.servers["s0"]
        target = WeightsVersion(version="0-1", path=str(models[1]))
        await order_swap(ServerApi(client.administration, known.url), target, mode="abort", deadline_s=60)
        client.pool.admit(known, url=known.url, version="0-1")

    turn, told = await generate_through(server, change, regex="[0-9]{300}")

    assert (turn.finish_reason, turn.is_steered) == ("stop", True)
    assert [(span.version, span.start, span.end) for span in turn.spans] == [("0-1", 0, 301)]
    assert told == turn.output_ids
    expected = steered(models[1], turn.prompt_ids, turn.output_ids, allow(*[DIGITS] * 300, [EOS_ID]))
    answer = {"output_ids": turn.output_ids, "meta_info": {"output_token_logprobs": [[p] for p in turn.logprobs]}}
    assert_drawn_from(expected, answer)


@pytest.mark.anyio
async def test_a_grammar_that_is_none_is_an_error_at_once_and_casts_no_doubt(server: Server) -> None:
    async with client_of(server) as client:
        with pytest.raises(GenerationError, match="refused.*regex"):
            await client.generate([5], {"max_new_tokens": 8, "regex": "[0-9"})
        assert not client.pool.servers["s0"].doubt


@pytest.mark.anyio
async def test_the_likeliest_tokens_reach_whoever_asks_the_client(server: Server) -> None:
    async with client_of(server) as client:
        turn, _ = await client.generate([5], {"max_new_tokens": 8, "temperature": 0.0, "top_logprobs_num": 2})

    assert turn.top_logprobs is not None
    assert [at[0][0] for at in turn.top_logprobs] == turn.output_ids
    assert [at[0][1] for at in turn.top_logprobs] == pytest.approx(turn.logprobs, abs=TOLERANCE)
    assert {len(at) for at in turn.top_logprobs} == {2}
