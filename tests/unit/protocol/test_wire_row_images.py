"""The images of a row travel with its ticket by reference; what has no such place in the row is no ticket."""

from typing import Any

import msgspec
import pytest

from areal_async.errors import WireError
from areal_async.protocol.evaluations import EvalTicket
from areal_async.protocol.fields import MAX_IMAGES
from areal_async.protocol.types import ImageRef, RowImage, Ticket
from areal_async.protocol.wire import decode, encode

REF = ImageRef(sha256="0" * 64, num_bytes=3, width=32, height=64)
ROW: dict[str, Any] = {"image": None, "parts": [{"text": "a"}, {"image": None}], "question": "?"}
IMAGES = [RowImage(place=["image"], image=REF), RowImage(place=["parts", 1, "image"], reason="it is damaged")]
TICKET = Ticket(group_id="0-1-0", workflow="w", row=ROW, group_size=2, version="1-0", images=IMAGES)
EVAL_TICKET = EvalTicket(eval_id="1-0", index=3, workflow="w", row=ROW, images=IMAGES)


@pytest.mark.parametrize("ticket", [TICKET, EVAL_TICKET])
def test_images_of_a_row_come_back_in_their_places(ticket: Ticket | EvalTicket) -> None:
    assert decode(encode(ticket), type(ticket)) == ticket


@pytest.mark.parametrize("ticket", [TICKET, EVAL_TICKET])
def test_a_ticket_of_an_older_controller_has_no_images(ticket: Ticket | EvalTicket) -> None:
    older = msgspec.json.decode(encode(ticket))
    del older["images"]

    assert decode(msgspec.json.encode(older), type(ticket)).images == []


REF_JSON = msgspec.to_builtins(REF)


@pytest.mark.parametrize("ticket", [TICKET, EVAL_TICKET])
@pytest.mark.parametrize(
    "images",
    [
        [{"place": [], "image": REF_JSON}],
        [{"place": ["image", 0], "image": REF_JSON}],
        [{"place": ["picture"], "image": REF_JSON}],
        [{"place": ["parts", 2], "image": REF_JSON}],
        [{"place": ["parts", -1, "image"], "image": REF_JSON}],
        [{"place": ["parts", "1", "image"], "image": REF_JSON}],
        [{"place": ["parts"], "image": REF_JSON}],
        [{"place": ["question"], "image": REF_JSON}],
        [{"place": ["question", 0], "image": REF_JSON}],
        [{"place": ["image"] * 100, "image": REF_JSON}],
        [{"place": ["x" * 2000], "image": REF_JSON}],
        [{"place": ["image"], "image": REF_JSON}, {"place": ["image"], "image": REF_JSON}],
        [{"place": ["image"]}],
        [{"place": ["image"], "image": REF_JSON, "reason": "and yet"}],
        [{"place": ["image"], "image": {**REF_JSON, "sha256": "x"}}],
        [{"place": ["image"], "reason": "r"}] * (MAX_IMAGES + 1),
        [{"place": "image", "image": REF_JSON}],
    ],
)
def test_hostile_images_are_refused(ticket: Ticket | EvalTicket, images: list[Any]) -> None:
    hostile = msgspec.json.encode({**msgspec.json.decode(encode(ticket)), "images": images})

    with pytest.raises(WireError):
        decode(hostile, type(ticket))
