"""A producer's own list outlives it, and its stamps never claim more than was acknowledged."""

from pathlib import Path

import pytest

from areal_async.errors import WireError
from areal_async.protocol.publish_log import STAMP_HEADER, PublishLog, decode_stamp, encode_stamp, read_receipts
from areal_async.protocol.types import Slot, SlotStatus

SLOT = Slot(sibling=3, sample_uid="0-1-0.3.n.ab", status=SlotStatus.SCORED, oldest="1-0", newest="1-0")


def test_a_stamp_claims_only_the_unbroken_row_of_acknowledged_messages(tmp_path: Path) -> None:
    receipts = PublishLog(tmp_path, "n")
    first, second = receipts.stamp(), receipts.stamp()

    receipts.acknowledge(second, group_id="0-1-0", slots=[])

    assert receipts.stamp().num_acknowledged == 0
    receipts.acknowledge(first, group_id="0-1-0", slots=[])
    assert receipts.stamp().num_acknowledged == 2


def test_two_processes_of_one_node_are_two_producers(tmp_path: Path) -> None:
    for _ in range(2):
        receipts = PublishLog(tmp_path, "n")
        receipts.acknowledge(receipts.stamp(), group_id="0-1-0", slots=[SLOT])

    produced = read_receipts(tmp_path)

    assert [[one.number for one in each.receipts] for each in produced.values()] == [[1], [1]]
    assert {slot.sample_uid for each in produced.values() for slot in each.receipts[0].slots} == {SLOT.sample_uid}


def test_a_line_cut_short_by_a_kill_is_no_damage_and_a_garbled_one_is(tmp_path: Path) -> None:
    receipts = PublishLog(tmp_path, "n")
    for _ in range(2):
        receipts.acknowledge(receipts.stamp(), group_id="0-1-0", slots=[SLOT])
    path = next(tmp_path.rglob("*.jsonl"))
    first, second = path.read_bytes().splitlines(keepends=True)

    path.write_bytes(first + second[:20])
    cut_short = read_receipts(tmp_path)[receipts.producer]
    path.write_bytes(b"#" + first + second)
    garbled = read_receipts(tmp_path)[receipts.producer]

    assert (len(cut_short.receipts), cut_short.num_damaged) == (1, 0)
    assert (len(garbled.receipts), garbled.num_damaged) == (1, 1)


def test_a_file_that_cannot_be_written_holds_up_nobody(tmp_path: Path) -> None:
    (tmp_path / "produced").write_text("in the way")
    receipts = PublishLog(tmp_path, "n")

    receipts.acknowledge(receipts.stamp(), group_id="0-1-0", slots=[SLOT])

    assert receipts.stamp().num_acknowledged == 1


def test_stamp_survives_its_header(tmp_path: Path) -> None:
    stamp = PublishLog(tmp_path, "n").stamp()

    assert decode_stamp({STAMP_HEADER: encode_stamp(stamp)}) == stamp
    assert decode_stamp({}) is None
    for damaged in ("{}", "\udcff", '{"producer": "n", "number": -1, "num_acknowledged": 0}'):
        with pytest.raises(WireError, match=STAMP_HEADER):
            decode_stamp({STAMP_HEADER: damaged})
