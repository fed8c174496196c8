"""What a new stream can go on from: an answer that took several is one that a single stream could have given."""

from typing import Any

import pytest

from areal_async.errors import GenerationError
from areal_async.inference.client import MAX_FRUITLESS_STREAMS
from areal_async.inference.request import check_token_ids, is_steered, num_held_back
from areal_async.protocol.types import Turn
from tests.fakes.fake_sglang import EventStream, FakeSglang, event
from tests.unit.inference.test_client import PARAMS, STOP, client_of, span, streaming

pytestmark = pytest.mark.anyio

ANEW: list[dict[str, Any]] = [
    {"json_schema": "{}"},
    {"regex": "a+"},
    {"ebnf": 'root ::= "a"'},
    {"structural_tag": "{}"},
    {"frequency_penalty": 0.5},
    {"presence_penalty": -0.5},
    {"repetition_penalty": 1.1},
    {"sampling_seed": 0},
]


def test_what_steers_is_what_changes_the_logits() -> None:
    steering = [*ANEW[:-1], {"logit_bias": {"1": 1.0}}, {"min_new_tokens": 1}]
    neutral = {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "regex": "", "min_new_tokens": 0, "logit_bias": {}}

    assert all(is_steered({**PARAMS, **one}) for one in steering)
    for one in ({}, neutral, {"min_p": 0.1, "top_p": 0.5, "top_k": 3}, {"sampling_seed": 0}, {"stop": ["a"]}):
        assert not is_steered({**PARAMS, **one}), one


def test_a_stop_string_holds_back_what_may_be_its_beginning() -> None:
    assert num_held_back({"stop": "a"}) == 0
    assert num_held_back({"stop": ["ab", "\N{EURO SIGN}x"]}) == 3


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids"])
@pytest.mark.parametrize("token", [-1, 300])
def test_a_token_outside_the_vocabulary_is_refused(name: str, token: int) -> None:
    ids: dict[str, Any] = {"logit_bias": {str(token): 1.0}, "stop_token_ids": [token]}

    check_token_ids({name: {"299": 1.0} if name == "logit_bias" else [299]}, 300)
    with pytest.raises(GenerationError, match=f"{name}: refused: got token id {token}, need 0 to 299"):
        check_token_ids({name: ids[name]}, 300)


async def broken_after_three(params: dict[str, Any], *rest: int) -> tuple[Turn, FakeSglang, list[list[int]]]:
    """Return what comes of 10, 11, 12, a break, and ``rest`` of another server, its request, and what was told when."""

    async def break_after_three(request: dict[str, Any], stream: EventStream) -> None:
        await stream.send([10, 11], "1-3")
        await stream.send([12], "1-3")
        stream.break_off()

    last = event([*rest], "1-4", finish_reason=STOP, weight_versions=[span("1-4", 0, len(rest))])
    first, second = FakeSglang(break_after_three, version="1-3"), FakeSglang(streaming(last), version="1-4")
    told: list[list[int]] = []
    async with client_of(first, second) as client:
        turn, _ = await client.generate(
            [1, 3], {**PARAMS, **params}, preferred=client.pool.servers["s0"], on_tokens=told.append
        )
    return turn, second, told


@pytest.mark.parametrize("params", ANEW, ids=str)
async def test_an_answer_whose_next_token_depends_on_all_before_is_begun_anew(params: dict[str, Any]) -> None:
    turn, second, told = await broken_after_three(params, 20, 21, 2)

    assert (turn.output_ids, turn.logprobs) == ([20, 21, 2], [-0.2, -0.21, -0.02])
    assert second.requests[0]["input_ids"] == [1, 3]
    assert second.requests[0]["sampling_params"] == {**PARAMS, **params}
    assert [(s.version, s.start, s.end) for s in turn.spans] == [("1-4", 0, 3)]
    assert turn.oldest == "1-4", "nothing of the older one is left"
    assert told == [[20, 21, 2]], "nobody was told what was not to stay"


async def test_with_a_stop_string_its_possible_beginning_is_said_again() -> None:
    turn, second, told = await broken_after_three({"stop": ["abc"]}, 20, 21, 2)

    assert turn.output_ids == [10, 20, 21, 2]
    assert second.requests[0]["input_ids"] == [1, 3, 10]
    assert second.requests[0]["sampling_params"]["max_new_tokens"] == PARAMS["max_new_tokens"] - 1
    assert [(s.version, s.start, s.end) for s in turn.spans] == [("1-3", 0, 1), ("1-4", 1, 4)]
    assert [id for ids in told for id in ids] == turn.output_ids


async def test_min_new_tokens_counts_what_was_received() -> None:
    _, second, _ = await broken_after_three({"min_new_tokens": 5}, 20, 21, 2)
    assert second.requests[0]["sampling_params"]["min_new_tokens"] == 2

    _, second, _ = await broken_after_three({"min_new_tokens": 2}, 20, 21, 2)
    assert second.requests[0]["sampling_params"]["min_new_tokens"] == 0


async def test_an_answer_that_is_begun_anew_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that were had before are no progress."""

    async def break_after_one(request: dict[str, Any], stream: EventStream) -> None:
        await stream.send([10], "1-3")
        stream.break_off()

    monkeypatch.setattr("areal_async.inference.client.FIRST_BACKOFF_S", 0.0)
    servers = [FakeSglang(break_after_one) for _ in range(MAX_FRUITLESS_STREAMS + 2)]
    async with client_of(*servers) as client:
        with pytest.raises(GenerationError, match="streams in a row gave no new token"):
            await client.generate([1], {**PARAMS, "regex": "a"})

    assert sum(len(server.requests) for server in servers) == MAX_FRUITLESS_STREAMS + 1


async def test_top_logprobs_are_asked_for_beside_the_sampling_and_come_with_their_tokens() -> None:
    tops = [[[-0.1, 7, None], [-2.0, 8, None]], [[-0.2, 2, None], [-3.4028234663852886e38, 9, None]]]
    events = (
        event([7], "1-0", output_top_logprobs=tops[:1]),
        event([2], "1-0", output_top_logprobs=tops[1:], finish_reason=STOP, weight_versions=[span("1-0", 0, 2)]),
    )
    async with client_of(server := FakeSglang(streaming(*events))) as client:
        turn, _ = await client.generate([1], {**PARAMS, "top_logprobs_num": 2})

    assert (server.requests[0]["top_logprobs_num"], server.requests[0]["sampling_params"]) == (2, PARAMS)
    assert turn.top_logprobs == [[(7, -0.1), (8, -2.0)], [(2, -0.2)]], "what cannot come is left out"


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({"backend": "embedded"}, False),
        ({"backend": "sglang"}, True),
        ({"backend": "sglang", "flags": ("--enable-deterministic-inference",)}, False),
    ],
    ids=str,
)
async def test_a_seed_goes_to_servers_that_draw_by_it_only(settings: dict[str, Any], *, is_refused: bool) -> None:
    end = event([2], "1-0", finish_reason=STOP, weight_versions=[span("1-0", 0, 1)])
    async with client_of(server := FakeSglang(streaming(end)), **settings) as client:
        if is_refused:
            with pytest.raises(GenerationError, match="seed: refused: got one with servers that do not draw by it"):
                await client.generate([1], {**PARAMS, "sampling_seed": 5})
        else:
            await client.generate([1], {**PARAMS, "sampling_seed": 5})

    assert len(server.requests) == (0 if is_refused else 1)


async def test_a_refusal_inside_a_stream_needs_no_logprobs_for_the_token_that_comes_with_it() -> None:
    """SGLang's event for a grammar that does not compile has a token that nobody has drawn."""
    reason = {"type": "abort", "message": "Failed to compile regex grammar: no", "status_code": 400}
    refused = event([23], "1-0", finish_reason=reason, output_token_logprobs=[], completion_tokens=1)
    async with client_of(FakeSglang(streaming(refused))) as client:
        with pytest.raises(GenerationError, match="server refused the request: Failed to compile regex grammar"):
            await client.generate([1], {**PARAMS, "regex": "["})
