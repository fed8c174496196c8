"""Every decoder of bytes that another process wrote, with valid messages to damage and the error it may end in.

One line in ``DECODERS`` adds one: ``tools/fuzz.py`` and ``tests/unit/test_decoders.py`` take them from here.
"""

import io
import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import PIL.Image
import torch
from safetensors.torch import save

from areal_async.bus import decode_state, restored
from areal_async.bus.api import decode_answer as decode_broker_answer
from areal_async.config.settings import Settings
from areal_async.config.sources import dump_settings, load_settings
from areal_async.controller.accounts import Accounts
from areal_async.controller.book_keeping import BooksState
from areal_async.errors import BusError, GenerationError, UserError, WireError
from areal_async.inference.completion import Completion
from areal_async.inference.embedded.engine.tensor_files import read_tensors
from areal_async.inference.faults import ServerFault
from areal_async.inference.http import context_tokens_of, error_message, read_load
from areal_async.inference.http import decode_answer as decode_server_answer
from areal_async.inference.pool import ServerHandle
from areal_async.inference.streams import DONE, EventSplitter
from areal_async.process.json_lines import decode_object
from areal_async.protocol import arms, evaluations, run_state, types, wire
from areal_async.protocol.events import AlarmRaised
from areal_async.protocol.journal import Journal, JournalState
from areal_async.protocol.publish_log import (
    STAMP_HEADER,
    ProducerSequence,
    Receipt,
    ReceivedSlot,
    decode_stamp,
    encode_stamp,
)
from areal_async.protocol.types import NOT_SAMPLED, CutKind, OutcomeKind, SlotStatus, Version
from areal_async.rollout.rewards.process import decode_answer as decode_reward_answer
from areal_async.rollout.rewards.process import decode_length
from areal_async.rollout.rewards.worker import Answer
from areal_async.trainer.batch.ledger import Ledger, LedgerFile
from areal_async.trainer.output.archive import lines_through
from areal_async.vision.images import ImageError, ImageLimits, take_image
from areal_async.vision.pixels import patches
from areal_async.vision.spec import VisionSpec


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Something that reads bytes it cannot trust."""

    name: str
    decode: Callable[[bytes], object]
    corpus: tuple[bytes, ...]
    """Messages that it accepts."""
    refuses: tuple[type[Exception], ...] = (WireError,)
    """Errors that it may end in."""


def decoder(
    name: str, decode: Callable[[bytes], object], *corpus: bytes, refuses: tuple[type[Exception], ...] = (WireError,)
) -> Decoder:
    """Return one line of the table."""
    return Decoder(name=name, decode=decode, corpus=corpus, refuses=refuses)


def of_record(*records: types.Record) -> Decoder:
    """Return the decoder of the records' kind."""
    kind = type(records[0])
    return decoder(kind.__name__, partial(wire.decode, kind=kind), *map(wire.encode, records))


_SAMPLED = Version(1, 2).pack()


def _trajectory(sibling: int = 0, *, credits: tuple[types.ReplyReward, ...] = ()) -> types.Trajectory:
    sequence = types.Sequence(
        token_ids=np.array([1, 2, 3, 4], dtype=np.int32),
        loss_mask=np.array([False, False, True, True]),
        logprobs=np.array([0, 0, -0.5, -0.25], dtype=np.float32),
        versions=np.array([NOT_SAMPLED, NOT_SAMPLED, _SAMPLED, _SAMPLED + 1], dtype=np.int64),
        turns=np.array([-1, -1, 0, 1], dtype=np.int16) if credits else None,
        temperatures=np.array([1, 1, 1, 0.5], dtype=np.float32) if credits else None,
        images=[types.ImageRef(sha256="0a" * 32, num_bytes=70, width=32, height=64)] if credits else None,
    )
    slot = types.Slot(
        sibling=sibling, sample_uid=f"0-3-0.{sibling}.node-a.x", status=SlotStatus.SCORED, reward=0.5, num_tokens=4,
        num_output_tokens=2, oldest="1-2", newest="1-3", credits=list(credits),
    )  # fmt: skip
    return types.Trajectory(slot=slot, sequences=[sequence], info={"turns": 1.0})


_CREDITS = types.ReplyReward(0.75, 1), types.ReplyReward(0.25, 1, "solver")


def _message() -> wire.EncodedMessage:
    return wire.encode_message(
        [_trajectory(0, credits=_CREDITS), _trajectory(1)],
        types.Ticket(row={}, group_id="0-3-0", workflow="gsm8k", version="1-2", num_failed_attempts=1, group_size=8),
    )


_PAYLOAD, _HEADERS, _ = _message()
_SLOTS = wire.decode_headers(_HEADERS, sequence=1, num_bytes=len(_PAYLOAD)).slots


def _decode_headers(data: bytes) -> object:
    """A line for each header, as the client passes them on, with surrogates for bytes that are no UTF-8."""
    names = (wire.GROUP_HEADER, wire.SLOTS_HEADER)
    values = data.decode(errors="surrogateescape").split("\n")
    return wire.decode_headers(dict(zip(names, values, strict=False)), sequence=1, num_bytes=len(data))


def _decode_payload_under_its_checksum(data: bytes) -> object:
    """A message as a producer may write it, whose checksum always fits."""
    slot = msgspec.structs.replace(_SLOTS[0], crc32=zlib.crc32(data))
    return wire.decode_trajectory(msgspec.msgpack.encode([data]), slot)


_META: dict[str, Any] = {
    "id": "5f1d", "finish_reason": None, "prompt_tokens": 3, "weight_version": "1-2", "completion_tokens": 2,
    "output_token_logprobs": [[-1.25, 17, None], [-0.5, 18, None]],
    "output_top_logprobs": [[[-0.5, 16, None], [-1.25, 17, None]], [[-0.5, 18, None]]],
}  # fmt: skip
_LAST = {
    **_META,
    "finish_reason": {"type": "stop", "matched": 18},
    "completion_tokens": 3,
    "output_token_logprobs": [[-1.0, 18, None]],
    "output_top_logprobs": [[[-1.0, 18, None]]],
    "weight_versions": [{"version": "1-2", "start": 0, "end": 2}, {"version": "1-3", "start": 2, "end": 3}],
}
_ABORT = {
    **_LAST,
    "finish_reason": {"type": "abort", "message": "no room", "status_code": 503},
    "weight_versions": None,
}


def _events(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: " + DONE + b"\n\n"


def _stream(data: bytes) -> object:
    """What a client does with the bytes of one stream, in pieces of 100, up to the turn."""
    completion = Completion([1, 2, 3], {"max_new_tokens": 16, "stop_token_ids": [18], "top_logprobs_num": 2})
    completion.begin_stream(ServerHandle("s0", version="1-1"))
    splitter = EventSplitter()
    with suppress(ServerFault, GenerationError):  # of an event: the stream ends there, and what came before is kept
        for start in range(0, len(data), 100):
            for event in splitter.feed(data[start : start + 100]):
                if event != DONE:
                    completion.add(event)
    completion.end_stream()
    turn = completion.turn()
    np.array(turn.output_ids, dtype=np.int32)
    np.array(turn.logprobs, dtype=np.float32)
    return turn


_LOADS = json.dumps({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1, "token_usage": 0.5}]}).encode()
_STEP_LINES = b'{"step": 1, "loss": 0.5}\n{"step": 2, "loss": NaN}\n'
_REPORT = json.dumps(
    {"node_id": "n0", "state": "runs", "waits_for": "", "servers": {"s0": {"version": "1-2"}}}
).encode()
_REFUSED = b'{"error": {"message": "too long", "code": 400}}'


def _tensor_file(data: bytes) -> object:
    with TemporaryDirectory() as directory:
        path = Path(directory, "model.safetensors")
        path.write_bytes(data)
        return dict(read_tensors(path))


def _settings_file(data: bytes) -> object:
    with TemporaryDirectory() as directory:
        path = Path(directory, "config.yaml")
        path.write_bytes(data)
        return load_settings(path, use_environment=False)


_CUT = types.Cut(
    lineage=2, step=5, seed=7, max_staleness=2, branches={"2": 3},
    groups=[
        types.CutGroup(
            group_id="0-3-0", workflow="gsm8k", slots=[types.CutSlot(slot=_SLOTS[0], sequence=9)], num_failed_attempts=1
        )
    ],
)  # fmt: skip
_GROUP = types.UpdateGroup(
    name="g1", address="10.0.0.1", port=7000, backend="gloo", size=3, ranks={"s0": 1, "s1": 2}, incarnations={"s0": "a"}
)
_TENSOR = types.TensorSpec(name="lm_head.weight", dtype="bfloat16", shape=[128, 64])
_ALARM = msgspec.json.encode(
    AlarmRaised(name="logprob_gap", step=7, weights_version="1-7", sentence="they are apart", value=None, bound=0.5)
)
_RECEIPT = msgspec.json.encode(
    Receipt(number=3, group_id="0-3-0", slots=[ReceivedSlot(sibling=0, sample_uid="0-3-0.0.n.x", crc32=7)])
)
_WEIGHTS = types.WeightsVersion(
    version="1-4",
    path="/runs/r/weights/1-4",
    sha256={"model.safetensors": "0" * 64},
    group=_GROUP,
    buckets=[[_TENSOR]],
)
_ANSWER = evaluations.EvalResult(eval_id="1-2", index=3, reward=1.0, oldest="1-2", newest="1-3")
_ARM = arms.Arm(name="old", arm_id="old-1", path="m", share=0.1, first_admission=3, first_position=3)
_EVALUATION = evaluations.EvalRecord(
    eval_id="1-2", step=2, accuracy=0.5, num_scored=4, num_failed=1, oldest="1-2", newest="1-3", low=0.1, high=0.9
)


def _journal(books: Journal | Accounts | None = None) -> Journal:
    read = books or Journal()
    read.add_cut(_CUT, sequence=4)
    for attempt, kind in enumerate((OutcomeKind.TRAINED, OutcomeKind.FAILED)):
        read.add_outcome(types.Outcome(group_id=f"0-9-{attempt}", kind=kind, lineage=2, step=5))
    return read.journal if isinstance(read, Accounts) else read


def _books() -> BooksState:
    books = Accounts(max_groups_in_flight=8)
    _journal(books)
    accounts = books.state()
    assert accounts is not None
    return BooksState(accounts=accounts, visits=[(3, 0.5)])


def _journal_of(data: bytes) -> Journal:
    state = decode_state(data, JournalState)
    return restored(Journal.of_state, state, [types.Cut(lineage=1, step=step) for step in state.cuts])


def _books_of(data: bytes) -> None:
    restored(Accounts(max_groups_in_flight=8).restore, decode_state(data, BooksState).accounts)


_VISION = VisionSpec(
    family="qwen3_vl",
    image_token_id=5,
    video_token_id=8,
    vision_start_token_id=6,
    vision_end_token_id=7,
    patch_size=4,
    merge_size=2,
    temporal_patch_size=2,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    min_pixels=64,
    max_pixels=64 * 64,
)
_IMAGE = np.arange(24 * 16 * 3, dtype=np.uint8).reshape(16, 24, 3)


def _image(kind: str) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.fromarray(_IMAGE).save(buffer, kind)
    return buffer.getvalue()


DECODERS: tuple[Decoder, ...] = (
    # streams and keys
    of_record(
        types.Ticket(
            group_id="0-3-0",
            workflow="gsm8k",
            row={"question": "1+1?", "n": [1, {"a": None}]},
            group_size=8,
            version="1-2",
            num_failed_attempts=1,
            number=17,
        )
    ),
    of_record(types.Outcome(group_id="0-3-0", kind=OutcomeKind.FAILED, lineage=2, step=5, reason="it broke")),
    of_record(_CUT, types.Cut(kind=CutKind.BEGIN, lineage=2, step=4)),
    of_record(evaluations.EvalTicket(eval_id="1-2", index=3, workflow="gsm8k", row={"question": "1+1?"})),
    of_record(_ANSWER),
    of_record(_EVALUATION),
    of_record(arms.ArmTicket(eval_id="1-2", index=3, workflow="gsm8k", row={}, arm="old", arm_id="old-1", number=7)),
    of_record(arms.ArmResult(arm_id="old-1", number=7, pinned=_ANSWER, newest=_ANSWER)),
    of_record(arms.Arms(by_name={"old": _ARM}, ordered=["new"])),
    of_record(arms.ArmState(arm_id="old-1", num_asked=4, open=[arms.OpenPrompt(3, 1)], levels={"-100": 2}, low=-0.5)),
    of_record(types.LineageRecord(lineage=2)),
    of_record(types.CheckpointRecord(version="1-4", path="/runs/r/checkpoints/1-4")),
    of_record(
        types.Admitted(
            total=30,
            num_fresh=29,
            num_readmitted=2,
            num_skipped=1,
            known={"0-1": 7},
            mixes=[types.Mix(start=20, weights=[3, 0, 1], counts=[12, 5, 3])],
        )
    ),
    of_record(run_state.FleetMembers(indices=[0, 2])),
    of_record(run_state.OrderedHosts(added=["node4"], removed=["node2"])),
    of_record(run_state.Snapshot(sequence=7, entry_sha256="0" * 64, state=b"\x80", state_sha256="0" * 64)),
    decoder("journal's state", _journal_of, msgspec.msgpack.encode(_journal().state())),
    decoder("books' state", _books_of, msgspec.msgpack.encode(_books())),
    of_record(types.DeadLetter(stream="S", subject="a.b", sequence=3, reason="why", reader="node", data=b"\xff")),
    of_record(run_state.RunState(state="failed", reason="why")),
    of_record(run_state.ServerState(server_id="n0-0", node_id="n0", url="http://127.0.0.1:1", version="1-2")),
    of_record(_WEIGHTS, types.WeightsVersion(version="1-4", path="/w")),
    decoder("trajectory headers", _decode_headers, "\n".join(_HEADERS.values()).encode()),
    decoder("trajectory message", lambda data: wire.decode_trajectory(data, _SLOTS[0]), _PAYLOAD),
    decoder(
        "trajectory payload", _decode_payload_under_its_checksum, wire.encode_trajectory(_trajectory(credits=_CREDITS))
    ),
    decoder(
        "producer's stamp",
        lambda data: decode_stamp({STAMP_HEADER: data.decode(errors="surrogateescape")}),
        encode_stamp(ProducerSequence(producer="n0.1", number=3, num_acknowledged=2)).encode(),
    ),
    # core messages and the broker's answers
    decoder("report", partial(wire.decode_json, kind=dict[str, Any], what="report"), _REPORT),
    decoder("report shown", decode_object, _REPORT, b"{}"),
    decoder("broker's answer", partial(decode_broker_answer, "s"), b'{"stream":"S","seq":4}', refuses=(BusError,)),
    # servers
    decoder(
        "generation stream",
        _stream,
        _events({"output_ids": [17, 18], "meta_info": _META}, {"output_ids": [18], "meta_info": _LAST}),
        _events({"output_ids": [17, 18], "meta_info": _META}, {"output_ids": [18], "meta_info": _ABORT}),
        _events({"error": {"message": "no", "code": 400}}),
        refuses=(ServerFault, GenerationError),
    ),
    decoder("server's loads", lambda data: read_load(decode_server_answer(data)), _LOADS, refuses=(ServerFault,)),
    decoder(
        "server's context",
        lambda data: context_tokens_of(decode_server_answer(data)),
        b'{"context_length": 512, "max_req_input_len": 506, "speculative_num_draft_tokens": 8}',
        refuses=(),
    ),
    decoder("server's refusal", error_message, _REFUSED, b'{"detail": [1]}', b"Not found"),
    # reward workers
    decoder("reward answer", decode_reward_answer, msgspec.msgpack.encode(Answer(value=0.5)), refuses=(EOFError,)),
    decoder(
        "reward frame", lambda data: decode_length((data + b"\0" * 4)[:4]), b"\x02\x00\x00\x00", refuses=(EOFError,)
    ),
    # images of conversations
    decoder(
        "image",
        partial(take_image, spec=_VISION, limits=ImageLimits(max_source_pixels=2**20)),
        *map(_image, ("PNG", "JPEG", "GIF", "WEBP")),
        refuses=(ImageError,),
    ),
    decoder("image's pixels", partial(patches, spec=_VISION), _image("PNG"), refuses=(ImageError,)),
    # files of the run directory
    decoder(
        "ledger",
        partial(Ledger.decode, what="ledger"),
        msgspec.json.encode(LedgerFile(version="1-4", trained={"3": ["0-1-0"], "4": ["0-2-0", "0-3-1"]})),
    ),
    decoder("alarm", partial(wire.decode_json, kind=AlarmRaised, what="alarm"), _ALARM),
    decoder("receipt", partial(wire.decode_json, kind=Receipt, what="receipt"), _RECEIPT),
    decoder("metrics file", partial(lines_through, step=1), _STEP_LINES),
    decoder(
        "model.safetensors", _tensor_file, save({"a": torch.ones(4), "b": torch.ones(2, 2)}), refuses=(ValueError,)
    ),
    decoder("config.yaml", _settings_file, dump_settings(Settings()).encode(), refuses=(UserError,)),
)
