"""The broker behind the faults' proxy lets anyone in, without a key, and has JetStream."""

from pathlib import Path

import pytest

from areal_async.bus import Role, open_bus
from areal_async.process.host import LOOPBACK
from areal_async.protocol.subjects import Names
from tests.brokers import PATIENCE_S
from tools.faults_server import running_server

pytestmark = pytest.mark.anyio


async def test_whoever_has_no_key_may_ask_for_everything(tmp_path: Path) -> None:
    with running_server(tmp_path) as port:
        async with open_bus(
            f"nats://{LOOPBACK}:{port}", names=Names("broker"), role=Role.NODE, connect_deadline_s=PATIENCE_S
        ) as bus:
            assert (await bus.api.ask("$JS.API.STREAM.NAMES"))["total"] == 0
