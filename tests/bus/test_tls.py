"""An external broker over TLS, with credentials: the bus works over it, and what is wrong is said in one sentence.

The certificates are made by ``openssl``; the broker is the real one, started as an operator would start it.
"""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from areal_async.bus import Role, credentials_for, declare, open_bus, take_trainer_consumer
from areal_async.bus.__main__ import main
from areal_async.bus.accounts import accounts
from areal_async.bus.connection import connect
from areal_async.bus.private import ensure_key
from areal_async.bus.server import find_binary
from areal_async.bus.streams import delete_run
from areal_async.config.settings import BusSettings, RolloutSettings, RunSettings, Settings
from areal_async.doctor import examine
from areal_async.errors import BusError, UserError
from areal_async.protocol.subjects import ADMITTED, Names
from areal_async.protocol.types import Admitted
from tests.brokers import PATIENCE_S, fetch_all, until
from tests.bus.stored import WORKFLOW, store, ticket

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Authority:
    """Who signs certificates, and the broker's own."""

    ca: Path
    certificate: Path
    key: Path


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    directory = tmp_path_factory.mktemp("tls")
    made = Authority(directory / "ca.pem", directory / "broker.pem", directory / "broker.key")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    for command in (
        ["req", "-x509", *curve, "-subj", "/CN=test authority", "-keyout", directory / "ca.key", "-out", made.ca],
        ["req", *curve[:-2], "-subj", "/CN=localhost", "-keyout", made.key, "-out", directory / "broker.csr"],
        [
            "x509", "-req", "-in", directory / "broker.csr", "-CA", made.ca, "-CAkey", directory / "ca.key",
            "-CAcreateserial", "-days", "2", "-extfile", directory / "names", "-out", made.certificate,
        ],
    ):  # fmt: skip
        (directory / "names").write_text("subjectAltName=DNS:localhost\nextendedKeyUsage=serverAuth\n")
        subprocess.run(["openssl", *command], check=True, capture_output=True, timeout=PATIENCE_S)
    return made


def one_user(key: str) -> dict[str, object]:
    """The part of a broker's configuration that lets in whoever has the key."""
    return {"authorization": {"users": [{"nkey": key}]}}


@asynccontextmanager
async def external_broker(
    directory: Path, *, users: dict[str, object], authority: Authority | None
) -> AsyncIterator[int]:
    """A broker of one's own; yields its port."""
    directory.mkdir()  # noqa: ASYNC240 - quick
    config: dict[str, object] = {
        "listen": "127.0.0.1:-1",
        "ports_file_dir": str(directory),
        "max_payload": 9 << 20,
        "jetstream": {"store_dir": str(directory / "store")},
        **users,
    }
    if authority is not None:
        config["tls"] = {"cert_file": str(authority.certificate), "key_file": str(authority.key)}
    (directory / "nats.conf").write_text(json.dumps(config))
    command = [find_binary(), "-c", directory / "nats.conf"]
    async with await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        ports = directory / f"nats-server_{process.pid}.ports"
        await until(lambda: ports.exists() and ports.read_text().endswith("}"))
        try:
            yield int(json.loads(ports.read_text())["nats"][0].rpartition(":")[2])
        finally:
            process.terminate()


@pytest.fixture
async def port(tmp_path: Path, authority: Authority, anyio_backend: object) -> AsyncIterator[int]:
    users = one_user(ensure_key(tmp_path / "user.nk"))
    async with external_broker(tmp_path / "broker", users=users, authority=authority) as port:
        yield port


async def test_the_bus_works_over_tls_with_credentials(tmp_path: Path, port: int, authority: Authority) -> None:
    await _work(tmp_path, port, tmp_path / "user.nk", authority)


async def test_the_bus_works_with_a_folder_of_keys_and_the_accounts_that_are_made_for_them(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    command = [sys.executable, "-m", "areal_async.bus", "test", str(keys)]
    made = json.loads((await anyio.run_process(command)).stdout)

    async with external_broker(tmp_path / "broker", users=made, authority=authority) as port:
        await _work(tmp_path, port, keys, authority)

    assert json.loads(json.dumps(accounts(Names("test"), keys))) == made["accounts"], "keys that are there are kept"
    keys.chmod(0o755)
    monkeypatch.setattr(sys, "argv", command[2:])
    with pytest.raises(SystemExit, match=r"^accounts: directory of keys: got .* with mode 755, .* need 700; chmod it$"):
        main()


async def _work(directory: Path, port: int, credentials: Path, authority: Authority) -> None:
    """Do a little of each role's work."""
    settings = Settings(
        run=RunSettings(name="test", directory=directory),
        rollout=RolloutSettings(group_size=2, min_group_size=2, max_stream_bytes=64 << 20),
        bus=BusSettings(
            url=f"tls://localhost:{port}", credentials=credentials, ca=authority.ca, operation_deadline_s=60.0
        ),
    )
    names = settings.names
    async with AsyncExitStack() as stack:
        operator, controller, node, trainer = [
            await stack.enter_async_context(
                open_bus(
                    settings.bus.url,
                    names=names,
                    role=role,
                    credentials=credentials_for(settings, settings.run_directory, role),
                    ca=settings.bus.ca,
                )
            )
            for role in (Role.OPERATOR, Role.CONTROLLER, Role.NODE, Role.TRAINER)
        ]

        await declare(operator, settings)
        await controller.publish(names.tickets(WORKFLOW), ticket("0-0-0", group_size=2))
        async with node.consume(names.tickets_stream, names.nodes_consumer) as inbox:
            (delivery,) = await fetch_all(inbox, 1)
            await store(node, "0-0-0", [0, 1], group_size=2)
            assert await delivery.ack_sync()
        consumer = await take_trainer_consumer(trainer, 1)
        async with trainer.consume(names.trajectories_stream, consumer) as inbox:
            assert not await trainer.settle(await fetch_all(inbox, 1))
        revision = await controller.compare_and_set(ADMITTED, Admitted(total=1), 0)
        assert await node.get(ADMITTED, Admitted) == (Admitted(total=1), revision)
        assert (await examine(settings, settings.run_directory, settings.bus.url)).run == "test"
        await delete_run(operator)


async def _connect(url: str, credentials: Path | None, ca: Path | None) -> None:
    with anyio.fail_after(PATIENCE_S):  # told at once, not after the deadline
        connection = await connect(
            url, name="x", role=Role.NODE, credentials=credentials, ca=ca, deadline_s=2 * PATIENCE_S
        )
        await connection.aclose()


async def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, port: int, authority: Authority) -> None:
    good, foreign, open_to_all = tmp_path / "user.nk", tmp_path / "foreign.nk", tmp_path / "open.nk"
    ensure_key(foreign)
    shutil.copy(good, open_to_all)
    open_to_all.chmod(0o640)
    url, ca = f"tls://localhost:{port}", authority.ca
    await _connect(url, good, ca)
    await _connect(f"nats://localhost:{port}", good, ca)

    for address, credentials, trusted, match in (
        (url, foreign, ca, "refused the role node with credentials .*foreign.nk; check bus.credentials"),
        (url, None, ca, "refused the role node with credentials None; check bus.credentials"),
        (url, open_to_all, ca, "bus.credentials: got .*open.nk with mode 640, .* need 600; chmod it"),
        (url, good, None, "certificate is not trusted .*; set bus.ca"),
        (f"nats://localhost:{port}", good, None, "certificate is not trusted .*; set bus.ca"),
        (f"tls://127.0.0.1:{port}", good, ca, "certificate is not trusted .*IP address mismatch.*mend bus.url"),
        (url, good, tmp_path / "missing.pem", "bus.ca: got .*missing.pem, need a file of certificates"),
        (url, good, good, "bus.ca: got .*user.nk, need a file of certificates"),
    ):
        with pytest.raises(UserError, match=match) as raised:
            await _connect(address, credentials, trusted)
        assert "\n" not in str(raised.value)


async def test_credentials_are_never_shown_to_a_broker_without_the_tls_that_was_asked_for(tmp_path: Path) -> None:
    key = ensure_key(tmp_path / "user.nk")
    async with external_broker(tmp_path / "broker", users=one_user(key), authority=None) as port:
        with pytest.raises(UserError, match="offers no TLS"):
            await _connect(f"tls://localhost:{port}", tmp_path / "user.nk", None)


async def test_a_broker_that_comes_back_without_tls_is_not_talked_to(tmp_path: Path, authority: Authority) -> None:
    key = ensure_key(tmp_path / "user.nk")
    shown: list[bytes] = []

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.12.7","max_payload":1024,"nonce":"abc"}\r\n')
        shown.append(await reader.read())
        writer.close()

    async with external_broker(tmp_path / "broker", users=one_user(key), authority=authority) as port:
        connection = await connect(
            f"tls://localhost:{port}", name="x", role=Role.NODE, credentials=tmp_path / "user.nk", ca=authority.ca,
            deadline_s=PATIENCE_S,
        )  # fmt: skip
    async with await asyncio.start_server(impostor, "127.0.0.1", port):
        await until(lambda: len(shown) > 1)
        with pytest.raises(BusError):
            await connection.publish("x", b"x")
        await connection.aclose()

    assert b"".join(shown) == b""
