"""The pure parts of the embedded engine: drawing tokens, decoding text, reading requests, stamping versions."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_async.inference.embedded.engine.errors import RequestError, SchemaError
from areal_async.inference.embedded.engine.protocol import (
    SamplingParams,
    check_length,
    check_prompt_ids,
    parse_body,
    parse_sampling,
)
from areal_async.inference.embedded.engine.sampling import SamplingRows, sample, uniforms
from areal_async.inference.embedded.engine.sequence import RunningSequence
from areal_async.inference.embedded.engine.text import StopStrings, TextStream

NUM_DRAWS = 20_000


class ByteTokenizer:
    """One token per byte; 256 is a special token."""

    eos_token_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        kept = bytes(i for i in ids if i < 256)
        return kept.decode(errors="replace") + ("" if skip_special_tokens else "<eos>" * (len(ids) - len(kept)))


def rows(seeds: range, **columns: torch.Tensor | None) -> tuple[SamplingRows, torch.Tensor]:
    """Return rows of these columns, and a number for each."""
    uniforms_N = torch.from_numpy(uniforms(np.array(seeds, dtype=np.uint64), np.zeros(len(seeds), dtype=np.uint64)))
    empty = dict.fromkeys(("temperatures_N", "is_greedy_N", "top_k_N", "top_p_N", "min_p_N"))
    return SamplingRows(**{**empty, **columns}), uniforms_N


def frequencies(logits: torch.Tensor, **filters: float) -> torch.Tensor:
    count = len(logits)
    columns: dict[str, torch.Tensor | None] = {}
    if filters:
        columns = {
            "top_k_N": torch.full((NUM_DRAWS,), int(filters.get("top_k", 2**31))),
            "top_p_N": torch.full((NUM_DRAWS,), filters.get("top_p", 1.0)),
            "min_p_N": torch.full((NUM_DRAWS,), filters.get("min_p", 0.0)),
        }
    ids = sample(logits.expand(NUM_DRAWS, count), *rows(range(NUM_DRAWS), **columns)).ids_N
    return torch.bincount(ids, minlength=count) / NUM_DRAWS


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.05, 0.4, 0.0, 0.3, 0.25])
    found = frequencies(probs.log())

    torch.testing.assert_close(found, probs, atol=0.015, rtol=0)
    assert found[2] == 0


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, [0.0, 0.4, 0.0, 0.3, 0.0]),
        ({"top_p": 0.6}, [0.0, 0.4, 0.0, 0.3, 0.0]),
        ({"top_p": 0.3}, [0.0, 0.4, 0.0, 0.0, 0.0]),
        ({"min_p": 0.5}, [0.0, 0.4, 0.0, 0.3, 0.25]),
        ({"top_k": 3, "min_p": 0.7}, [0.0, 0.4, 0.0, 0.3, 0.0]),
    ],
)
def test_filters_cut_the_distribution(filters: dict[str, float], kept: list[float]) -> None:
    found = frequencies(torch.tensor([0.05, 0.4, 0.0, 0.3, 0.25]).log(), **filters)
    weights = torch.tensor(kept)

    torch.testing.assert_close(found, weights / weights.sum(), atol=0.015, rtol=0)


def test_logprobs_are_of_the_tempered_distribution_before_filters() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    columns = {
        "temperatures_N": torch.tensor([2.0]),
        "top_k_N": torch.tensor([1]),
        "top_p_N": torch.tensor([1.0]),
        "min_p_N": torch.tensor([0.0]),
    }
    drawn = sample(logits, *rows(range(1), **columns))

    assert drawn.ids_N.tolist() == [2]
    torch.testing.assert_close(drawn.logprobs_N, torch.log_softmax(logits / 2.0, dim=-1)[:, 2])


def test_a_greedy_row_among_sampled_ones_takes_the_most_likely() -> None:
    logits = torch.tensor([0.0, 0.1, 0.0]).expand(50, 3)
    is_greedy = torch.arange(50) % 2 == 0
    ids = sample(logits, *rows(range(50), is_greedy_N=is_greedy)).ids_N

    assert set(ids[is_greedy].tolist()) == {1}
    assert len(set(ids[~is_greedy].tolist())) > 1


def test_a_token_of_probability_zero_is_not_drawn_even_at_the_edge() -> None:
    plain = SamplingRows(None, None, None, None, None)
    ids = sample(torch.tensor([[0.0, 1.0]]).log(), plain, torch.zeros(1, dtype=torch.float64)).ids_N

    assert ids.tolist() == [1]


def test_uniforms_are_even_and_differ_by_seed_and_index() -> None:
    seeds, indexes = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64))
    values = uniforms(seeds.ravel(), indexes.ravel())

    assert len(np.unique(values)) == 40_000
    assert ((values >= 0) & (values < 1)).all()
    histogram, _ = np.histogram(values, bins=10, range=(0, 1))
    assert abs(histogram - 4_000).max() < 300


@given(st.text(max_size=30), st.lists(st.integers(min_value=1, max_value=4), max_size=60), st.binary(max_size=5))
def test_text_pieces_join_to_the_whole_text(text: str, cuts: list[int], junk: bytes) -> None:
    ids = list(text.encode("utf-8", errors="replace") + junk)
    stream = TextStream(ByteTokenizer(), skip_special_tokens=True, no_stop_trim=False)
    pieces, start = [], 0
    for cut in cuts:
        pieces.append(stream.push(ids[start : start + cut]))
        start += cut
    pieces.append(stream.finish(ids[start:], None))

    assert "".join(pieces) == ByteTokenizer().decode(ids, skip_special_tokens=True)


def test_a_character_is_held_back_until_it_is_whole() -> None:
    stream = TextStream(ByteTokenizer(), skip_special_tokens=True, no_stop_trim=False)
    euro = list("€".encode())

    assert [stream.push([i]) for i in euro] == ["", "", "€"]


@pytest.mark.parametrize(("no_stop_trim", "expected"), [(False, "abc"), (True, "abcXY")])
def test_the_stop_string_is_trimmed_unless_kept(*, no_stop_trim: bool, expected: str) -> None:
    stream = TextStream(ByteTokenizer(), skip_special_tokens=True, no_stop_trim=no_stop_trim)

    assert stream.push(list(b"ab")) + stream.finish(list(b"cXYz"), "XY") == expected


def test_a_beginning_stop_string_is_noticed() -> None:
    stops = StopStrings(ByteTokenizer(), ["STOP"])

    assert stops.match(list(b"abc")) == (None, False)
    assert stops.match(list(b"abcST")) == (None, True)
    assert stops.match(list(b"abcSTOP")) == ("STOP", True)


def test_sampling_defaults_are_sglangs() -> None:
    assert parse_sampling({}) == SamplingParams(temperature=1.0, top_p=1.0, top_k=-1)
    assert parse_sampling({}).most_tokens == 128


def test_temperature_zero_is_greedy_at_temperature_one() -> None:
    params = parse_sampling({"temperature": 0, "top_k": 5})

    assert params.is_greedy
    assert params.divisor == 1.0
    assert not params.has_filter


@pytest.mark.parametrize("name", ["n", "stop_regex", "beam_width", "custom_params"])
def test_an_unsupported_sampling_field_is_refused_only_when_it_asks_for_something(name: str) -> None:
    neutral = {"n": 1, "beam_width": 1, "custom_params": {}}.get(name)
    parse_sampling({name: neutral})

    with pytest.raises(RequestError, match=name):
        parse_sampling({name: {"n": 2, "stop_regex": "a+", "custom_params": {"a": 2}}.get(name, 3)})


def test_a_body_that_is_not_json_is_a_schema_error() -> None:
    with pytest.raises(SchemaError):
        parse_body(b"{")
    with pytest.raises(SchemaError):
        parse_body(json.dumps({"stream": "yes"}).encode())


@pytest.mark.parametrize(
    ("prompt", "sampling", "allowed"),
    [
        (10, {"max_new_tokens": 5}, 5),
        (10, {}, 88),
        (10, {"max_new_tokens": None}, 88),
        (10, {"max_new_tokens": 90}, 88),
    ],
)
def test_the_answer_is_cut_to_the_room_behind_the_prompt(
    prompt: int, sampling: dict[str, object], allowed: int
) -> None:
    assert check_length(prompt, parse_sampling(sampling), context_length=100) == allowed


@pytest.mark.parametrize(("prompt", "sampling"), [(100, {}), (94, {}), (10, {"max_new_tokens": 91})])
def test_what_cannot_fit_the_context_is_refused(prompt: int, sampling: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        check_length(prompt, parse_sampling(sampling), context_length=100)


@pytest.mark.parametrize("prompt_ids", [[], [0] * 100, [0, 10], [-1]])
def test_a_prompt_that_no_model_can_be_given_is_refused(prompt_ids: list[int]) -> None:
    with pytest.raises(RequestError):
        check_prompt_ids(prompt_ids, vocab_size=10, context_length=100)

    check_prompt_ids([0, 9], vocab_size=10, context_length=100)


def sequence_of(num_output_tokens: int, changes: list[tuple[str, int]]) -> RunningSequence:
    sequence = RunningSequence(
        rid="r",
        prompt_ids=(1,),
        params=SamplingParams(),
        max_new_tokens=100,
        stop_token_ids=frozenset(),
        stop_strings=None,
        seed=0,
        stream_interval=4,
        emit=lambda sequence, piece: None,
    )
    sequence.version_changes = changes
    sequence.output_ids = [0] * num_output_tokens
    return sequence


@pytest.mark.parametrize(
    ("num_tokens", "changes", "expected"),
    [
        (0, [], [("3", 0, 0)]),
        (5, [], [("3", 0, 5)]),
        (5, [("1", 2)], [("1", 0, 2), ("3", 2, 5)]),
        (5, [("1", 2), ("2", 2)], [("1", 0, 2), ("3", 2, 5)]),
        (5, [("1", 5)], [("1", 0, 5)]),
        (6, [("3", 2), ("2", 4)], [("3", 0, 2), ("2", 2, 4), ("3", 4, 6)]),
    ],
)
def test_spans_say_which_version_made_which_tokens(
    num_tokens: int, changes: list[tuple[str, int]], expected: list[tuple[str, int, int]]
) -> None:
    spans = sequence_of(num_tokens, changes).version_spans("3")

    assert [(span["version"], span["start"], span["end"]) for span in spans] == expected


def test_pieces_come_at_the_interval_and_the_first_at_once() -> None:
    sequence = sequence_of(0, [])
    sizes = []
    for _ in range(10):
        if sequence.append(7, -1.0):
            sizes.append(len(sequence.take_piece("3").token_ids))

    assert sizes == [1, 4, 4]
