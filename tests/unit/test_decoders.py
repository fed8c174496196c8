"""Whatever bytes come, a decoder ends in a value or in its declared error, quickly and without growing.

A small budget of what ``tools/fuzz.py`` does with a million inputs for each decoder.
"""

import signal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.errors import WireError
from areal_async.inference.faults import ServerFault
from areal_async.inference.streams import MAX_EVENT_BYTES, EventSplitter
from areal_async.protocol import types, wire
from tools.decoders import DECODERS, Decoder, decoder
from tools.fuzz import MAX_GROWTH_BYTES, fuzz, input_of, peak_bytes

SEED = 20
RARE = {"config.yaml"}
"""Milliseconds for each input."""

PARTS = {
    "Prompt", "Turn", "VersionSpan", "Slot", "Trajectory", "StoredMessage", "CutSlot", "CutGroup", "TensorSpec",
    "UpdateGroup", "Mix", "ImageRef", "RowImage",
}  # fmt: skip
"""Records that are parts of others, or never leave their process."""

every_decoder = pytest.mark.parametrize("one", DECODERS, ids=lambda one: one.name)


def test_every_record_that_travels_alone_is_in_the_table() -> None:
    kinds = {one.__name__ for one in _RECORDS}

    assert kinds - PARTS == kinds & {one.name for one in DECODERS}


@every_decoder
def test_decoder_accepts_its_valid_messages(one: Decoder) -> None:
    for message in one.corpus:
        one.decode(message)


@every_decoder
def test_damaged_messages_end_in_a_value_or_in_the_declared_error(one: Decoder) -> None:
    score = fuzz(one, seed=SEED, first=0, count=60 if one.name in RARE else 600)

    assert not score.findings
    assert score.num_accepted + score.num_refused == score.num_inputs


@every_decoder
@settings(max_examples=25, deadline=1000)
@given(noise=st.one_of(st.binary(max_size=300), st.text(max_size=100).map(lambda text: text.encode())))
def test_noise_ends_in_a_value_or_in_the_declared_error(one: Decoder, noise: bytes) -> None:
    try:
        one.decode(noise)
    except one.refuses:
        pass


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)
_RECORDS = [
    one
    for one in vars(types).values()
    if isinstance(one, type) and issubclass(one, types.Record) and one.__struct_fields__
]
_RECORDS.remove(types.Sequence)  # arrays: never a record on the wire


@pytest.mark.parametrize("kind", _RECORDS, ids=lambda kind: kind.__name__)
@settings(max_examples=25, deadline=1000)
@given(data=st.data())
def test_records_with_any_values_are_decoded_or_refused(kind: type[types.Record], data: st.DataObject) -> None:
    values = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(kind.__struct_fields__, _JSON)))

    try:
        wire.decode(msgspec.json.encode({"schema": wire.SCHEMA, **values}), kind)
    except WireError:
        pass


def test_fuzzer_finds_errors_hangs_and_growth() -> None:
    def hang(_: bytes) -> None:
        while True:
            pass

    def grow(_: bytes) -> None:
        bytearray(b"x") * (peak_bytes() + 2 * MAX_GROWTH_BYTES)

    for decode, found in ((lambda data: 1 / 0, "ZeroDivisionError"), (hang, "more than"), (grow, "grew by")):
        score = fuzz(decoder("bad", decode, b"x"), seed=SEED, first=0, count=1)
        assert found in " ".join(score.findings)


def test_a_timer_s_signal_between_inputs_is_ignored() -> None:
    class Corpus(tuple[bytes, ...]):
        def __len__(self) -> int:
            signal.raise_signal(signal.SIGPROF)
            return super().__len__()

    score = fuzz(Decoder(name="good", decode=bytes, corpus=Corpus((b"x", b"y"))), seed=SEED, first=0, count=2)

    assert (score.num_accepted, score.findings) == (2, [])


def test_an_input_is_a_function_of_its_seed_and_index() -> None:
    one = DECODERS[0]

    assert [input_of(one, seed=1, index=i) for i in range(50)] == [input_of(one, seed=1, index=i) for i in range(50)]
    assert input_of(one, seed=1, index=7) != input_of(one, seed=2, index=7)


def test_an_event_that_never_ends_is_given_up() -> None:
    splitter = EventSplitter()

    splitter.feed(b"x" * MAX_EVENT_BYTES)

    with pytest.raises(ServerFault, match="bytes of one event"):
        splitter.feed(b"x")
