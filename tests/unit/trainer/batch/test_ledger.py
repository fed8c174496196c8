"""A checkpoint's list of what was trained is exact, whatever wrote it, and takes little while the run goes on."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.errors import WireError
from areal_async.protocol.types import Version
from areal_async.trainer.batch.ledger import Ledger, LedgerFile

STEPS = st.lists(
    st.lists(st.from_regex(r"[0-9]{1,3}-[0-9]{1,5}-[0-9]", fullmatch=True) | st.text(max_size=5)), max_size=9
)


@given(STEPS, st.integers(0, 9))
def test_the_file_is_what_it_always_was_and_goes_on_from_wherever_it_is_read(steps: list[list[str]], cut: int) -> None:
    ledger = Ledger(Version(1, 0))
    for step, groups in enumerate(steps, start=1):
        if step == cut:
            ledger = Ledger.decode(ledger.encode(), what="ledger")
        ledger.add(Version(2, step), groups)
        assert ledger.newest == groups

    version = f"2-{len(steps)}" if steps else "1-0"
    trained = {str(step): groups for step, groups in enumerate(steps, start=1)}
    assert ledger.encode() == msgspec.json.encode(LedgerFile(version=version, trained=trained))
    assert dict(ledger.steps()) == dict(enumerate(steps, start=1))


def test_a_file_is_read_however_its_json_is_laid_out() -> None:
    ledger = Ledger.decode(b'{ "trained": { "1" : [ "0-1-0" ] },\n "version": "1-1" }', what="ledger")
    ledger.add(Version(1, 2), ["0-2-0"])

    assert ledger.encode() == b'{"version":"1-2","trained":{"1":["0-1-0"],"2":["0-2-0"]}}'


@pytest.mark.parametrize(
    "payload", [b"", b"{}", b'{"version":"1","trained":{}}', b'{"version":"1-1","trained":{"a":[]}}']
)
def test_a_damaged_file_is_refused_by_its_name(payload: bytes) -> None:
    with pytest.raises(WireError, match="ledger of 1-1"):
        Ledger.decode(payload, what="ledger of 1-1")
