"""The embedded broker is private to its owner, is healthy or not there, survives its death and not its launcher's."""

import asyncio
import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_async.bus import Bus, EmbeddedBroker, Role, declare, open_bus, server
from areal_async.bus.broker_config import write_config
from areal_async.bus.connection import connect
from areal_async.bus.private import write_private
from areal_async.bus.server import find_binary
from areal_async.config.settings import MESSAGE_BYTES, BusSettings, RunSettings, Settings
from areal_async.errors import BusError, UserError
from areal_async.process.host import LOOPBACK, free_port
from areal_async.protocol.subjects import ADMITTED
from areal_async.protocol.types import Admitted
from tests.brokers import PATIENCE_S, fetch_all, kill, running_broker, until

LAUNCHER = """
import sys, anyio
from pathlib import Path
from areal_async.bus import EmbeddedBroker
from areal_async.config.settings import RunSettings, Settings

async def main():
    broker = EmbeddedBroker(Settings(run=RunSettings(name="test", directory=Path(sys.argv[1]))))
    await broker.start()
    print(broker.pid, flush=True)
    await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.anyio
async def test_configuration_and_keys_are_readable_by_their_owner_alone(
    broker: EmbeddedBroker, settings: Settings
) -> None:
    files = [broker.credentials(role) for role in Role] + [settings.run_directory / "bus" / "nats.conf"]

    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE((settings.run_directory / "credentials").stat().st_mode) == 0o700
    assert all(broker.credentials(role).read_text() not in files[-1].read_text() for role in Role)


@pytest.mark.anyio
@pytest.mark.parametrize("folder", ["donn\u00e9es \u6570\u636e \U0001f680", "a\nb\t'c\"\\u00e9 $HOME {x} #1"])
async def test_a_run_lies_in_a_folder_of_any_name(tmp_path: Path, folder: str) -> None:
    async with running_broker(Settings(run=RunSettings(name="test", directory=tmp_path / folder))) as broker:
        assert broker.pid

    assert (tmp_path / folder / "test" / "bus" / "jetstream" / "jetstream").is_dir()


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["a\udcff", "a\x01", "a\x0c"])
async def test_a_folder_that_the_broker_cannot_be_told_is_refused(tmp_path: Path, name: str) -> None:
    broker = EmbeddedBroker(Settings(run=RunSettings(name="test", directory=tmp_path / name)))

    with pytest.raises(UserError, match="^run.directory: got '.*" + re.escape(ascii(name)[1:-1])):
        await broker.start()


@pytest.mark.anyio
async def test_every_write_is_synced_before_it_is_acknowledged(broker: EmbeddedBroker) -> None:
    host, port = broker.http_url.removeprefix("http://").split(":")
    async with await anyio.connect_tcp(host, int(port)) as stream:
        await stream.send(b"GET /varz HTTP/1.0\r\n\r\n")
        answer = b"".join([chunk async for chunk in stream])

    assert host == "127.0.0.1"
    assert b'"sync_always": true' in answer


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="another process's limits are set on Linux alone")
async def test_a_broker_that_froze_a_stream_for_want_of_room_is_started_again_and_has_all_it_acknowledged(
    broker: EmbeddedBroker, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.bus.server.HEALTH_INTERVAL_S", 0.05)
    names, frozen_pid = settings.names, broker.pid
    subject = names.trajectories("w", "0-0-0")
    async with open_bus(
        broker.url, names=names, role=Role.OPERATOR, credentials=broker.credentials(Role.OPERATOR)
    ) as bus:
        await bus.publish(subject, b"a" * 4096, msg_id="a")

        resource.prlimit(frozen_pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))  # no room in any file
        await bus.publish(subject, b"b" * 4096, msg_id="b")

        state = await bus.stream_state(names.trajectories_stream)
    assert broker.pid != frozen_pid
    assert state.num_messages == 2


@pytest.mark.anyio
async def test_a_broker_that_names_another_stream_at_each_look_is_making_them_and_is_left_alone(
    broker: EmbeddedBroker, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, answers = server._health, list[tuple[bytes, bytes]]()
    (streams,) = (settings.run_directory / "bus").glob("**/streams")
    pid = broker.pid

    async def ask_while_it_makes_one(port: int) -> tuple[bytes, bytes]:
        made = streams / f"MAKING_{len(answers)}"
        made.mkdir()  # a stream's folder is there before the stream is
        answer = await ask(port)
        made.rmdir()
        if answer[0] == server.UNAVAILABLE:  # on a very busy host it may not answer in time
            answers.append(answer)
        return answer

    monkeypatch.setattr("areal_async.bus.server.HEALTH_INTERVAL_S", 0.02)
    monkeypatch.setattr("areal_async.bus.server._health", ask_while_it_makes_one)
    await until(lambda: len(answers) >= 10)

    assert len(set(answers)) == len(answers)
    assert broker.pid == pid


@pytest.mark.anyio
async def test_a_killed_broker_comes_back_on_its_port_and_clients_go_on(
    broker: EmbeddedBroker, settings: Settings
) -> None:
    url, pid = broker.url, broker.pid
    async with open_bus(
        url, names=settings.names, role=Role.CONTROLLER, credentials=broker.credentials(Role.CONTROLLER)
    ) as bus:
        returns: list[bool] = []
        bus.connection.on_reconnect.append(lambda: returns.append(True))

        kill(broker)
        await bus.publish(bus.names.outcomes, b"x")

        await until(lambda: bool(returns))
        assert broker.url == url
        assert broker.pid != pid


@pytest.mark.anyio
async def test_a_connection_whose_broker_has_gone_is_closed_like_any_other(settings: Settings) -> None:
    """With something to say that nobody will read, and its tasks ended."""
    num_tasks = len(asyncio.all_tasks())
    broker = EmbeddedBroker(settings)
    await broker.start()
    try:
        key = broker.credentials(Role.OPERATOR)
        connection = await connect(broker.url, name="x", role=Role.OPERATOR, credentials=key, deadline_s=PATIENCE_S)
    finally:
        await broker.aclose()
    await until(lambda: not connection.is_connected)

    await connection.listen(connection.new_inbox(), lambda _: None)
    await connection.aclose()

    assert connection.is_closed
    assert len(asyncio.all_tasks()) == num_tasks


@pytest.mark.anyio
async def test_a_connection_is_closed_though_another_that_waited_for_its_end_was_cancelled(settings: Settings) -> None:
    """As the library's reconnecting is, in the turn of the loop in which it closes the transport."""
    async with running_broker(settings) as broker:
        key = broker.credentials(Role.OPERATOR)
        connection = await connect(broker.url, name="x", role=Role.OPERATOR, credentials=key, deadline_s=PATIENCE_S)
        transport = connection.client._transport
        assert transport is not None
        waiting = asyncio.ensure_future(transport.wait_closed())  # type: ignore[no-untyped-call]
        await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting

        await connection.aclose()

        assert connection.is_closed


@pytest.mark.anyio
async def test_keys_and_messages_outlive_the_broker(settings: Settings) -> None:
    keys = []
    for _ in range(2):
        async with running_broker(settings) as broker:
            keys.append(broker.credentials(Role.OPERATOR).read_text())

    assert keys[0] == keys[1]


@pytest.mark.anyio
async def test_a_log_that_was_taken_away_is_made_again(settings: Settings) -> None:
    logs = settings.run_directory / "logs"
    async with running_broker(settings) as broker:
        pid = broker.pid
        before = (logs / "nats.log").read_text()
        shutil.rmtree(logs)
        await until(lambda: (logs / "nats.log").exists() and "re-opened" in (logs / "nats.log").read_text())

        assert broker.pid == pid
    assert "Server is ready" in before
    assert "Shutdown" in (logs / "nats.log").read_text()


@pytest.mark.anyio
async def test_a_run_that_was_begun_in_the_brokers_one_account_goes_on_in_its_operators(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the store, the name of the account is all that another configuration changes."""
    names = settings.names

    def write_older(settings: Settings, *, path: Path, **places: Any) -> None:
        write_config(settings, path=path, **places)
        config = json.loads(path.read_text())
        users = [user for account in config.pop("accounts").values() for user in account["users"]]
        write_private(path, json.dumps({**config, "authorization": {"users": users}}).encode())

    monkeypatch.setattr(server, "write_config", write_older)
    async with running_broker(settings) as broker, _as(broker, settings, Role.OPERATOR) as operator:
        await declare(operator, settings)
        await operator.put(ADMITTED, Admitted(total=7))
        stored = [await operator.publish(names.tickets("w"), b"%d" % number) for number in range(3)]
        async with operator.consume(names.tickets_stream, names.nodes_consumer) as inbox:
            for delivery in await fetch_all(inbox, 2):
                assert await delivery.ack_sync()
    monkeypatch.undo()

    async with running_broker(settings) as broker, _as(broker, settings, Role.NODE) as node:
        assert (await node.get(ADMITTED, Admitted))[0] == Admitted(total=7)
        async with node.consume(names.tickets_stream, names.nodes_consumer) as inbox:
            (delivery,) = await fetch_all(inbox, 1)
    assert (delivery.data, delivery.sequence) == (b"2", stored[2].sequence)


def _as(broker: EmbeddedBroker, settings: Settings, role: Role) -> AbstractAsyncContextManager[Bus]:
    return open_bus(broker.url, names=settings.names, role=role, credentials=broker.credentials(role))


@pytest.mark.anyio
async def test_a_taken_port_is_told_in_one_sentence(settings: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        broker = EmbeddedBroker(settings.model_copy(update={"bus": BusSettings(port=port)}))

        with pytest.raises(UserError, match=rf"bus\.port: port {port} .* is taken"):
            await broker.start()


@pytest.mark.anyio
async def test_a_port_that_is_taken_after_it_was_looked_at_is_exchanged_for_another(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        drawn = [taken.getsockname()[1]]
        monkeypatch.setattr(server, "free_port", lambda *args, **names: drawn.pop() if drawn else free_port())

        async with running_broker(settings) as broker:
            assert broker.url != f"nats://{LOOPBACK}:{taken.getsockname()[1]}"


@pytest.mark.anyio
async def test_a_run_that_is_already_running_is_refused(broker: EmbeddedBroker, settings: Settings) -> None:
    with pytest.raises(UserError, match=f"already running in process {os.getpid()}"):
        await EmbeddedBroker(settings).start()


@pytest.mark.anyio
async def test_a_broker_that_cannot_start_tells_its_last_words(settings: Settings) -> None:
    store = settings.run_directory / "bus" / "jetstream"
    store.mkdir(parents=True)
    (store / "jetstream").write_text("in the way of a directory")

    with pytest.raises(BusError, match="ended with status 1; its last words: .*storage directory"):
        await EmbeddedBroker(settings).start()


@pytest.mark.anyio
async def test_a_broker_that_keeps_dying_ends_its_supervision(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.bus.server.MAX_RESTARTS", 1)
    broker = EmbeddedBroker(settings)
    await broker.start()

    with pytest.RaisesGroup(pytest.RaisesExc(BusError, match="died 2 times")):
        async with anyio.create_task_group() as supervision:
            supervision.start_soon(broker.run)
            first = broker.pid
            kill(broker)
            await until(lambda: broker.pid != first)
            kill(broker)
    await broker.aclose()


@pytest.mark.skipif(sys.platform != "linux", reason="the signal at the parent's death is Linux's")
def test_the_broker_dies_with_its_launcher(tmp_path: Path) -> None:
    launcher, pid = start_launcher(tmp_path)

    launcher.kill()
    launcher.communicate()

    anyio.run(until, lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.skipif(sys.platform != "linux", reason="looks a process up in /proc")
@pytest.mark.anyio
async def test_a_broker_left_over_by_a_killed_launcher_is_stopped(tmp_path: Path, settings: Settings) -> None:
    launcher, pid = start_launcher(tmp_path)
    os.kill(pid, signal.SIGSTOP)  # it cannot follow the signal that its launcher's death sends
    launcher.kill()
    launcher.communicate()

    async with running_broker(settings) as broker:
        await until(lambda: not Path(f"/proc/{pid}").exists())

        assert broker.pid != pid


@pytest.mark.anyio
async def test_an_older_broker_is_refused_by_its_greeting() -> None:
    greeting = b'INFO {"server_id":"x","version":"2.9.10","max_payload":1048576,"headers":true}\r\n'

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.send(greeting)
            async for _ in stream:
                await stream.send(b"PONG\r\n")

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as server:
        server.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)

        with pytest.raises(UserError, match=r"got nats-server 2\.9\.10, need 2\.12\.7"):
            await connect(f"nats://127.0.0.1:{port}", name="x", role=Role.NODE, credentials=None, deadline_s=PATIENCE_S)
        server.cancel_scope.cancel()


@pytest.mark.anyio
async def test_an_unreachable_broker_is_told_in_one_sentence() -> None:
    with anyio.fail_after(PATIENCE_S), pytest.raises(UserError, match=r"not reachable within 0\.3 s .*set bus\.url"):
        await connect("nats://127.0.0.1:1", name="x", role=Role.NODE, credentials=None, deadline_s=0.3)


@pytest.mark.anyio
@pytest.mark.parametrize("url", ["http://127.0.0.1:4222", "127.0.0.1:4222", "nats://", "nats://host:port"])
async def test_what_is_no_address_is_told_at_once(url: str) -> None:
    with pytest.raises(UserError, match=r"bus\.url: got .*, need nats://host:port"):
        await connect(url, name="x", role=Role.NODE, credentials=None, deadline_s=PATIENCE_S)


@pytest.mark.anyio
async def test_an_address_that_asks_for_tls_does_not_get_less(broker: EmbeddedBroker) -> None:
    with pytest.raises(UserError, match="no TLS"):
        await connect(
            broker.url.replace("nats://", "tls://"),
            name="x",
            role=Role.NODE,
            credentials=broker.credentials(Role.NODE),
            deadline_s=PATIENCE_S,
        )


@pytest.mark.anyio
async def test_a_broker_without_jetstream_is_refused(tmp_path: Path) -> None:
    command = [find_binary(), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", tmp_path]
    async with await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        ports = tmp_path / f"nats-server_{process.pid}.ports"
        await until(lambda: ports.exists() and ports.read_text().endswith("}"))
        url = ports.read_text().split('"')[3]

        with pytest.raises(UserError, match="JetStream is not enabled"):
            await connect(url, name="x", role=Role.NODE, credentials=None, deadline_s=PATIENCE_S)
        process.kill()


def test_an_older_binary_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "nats-server"
    old.write_text("#!/bin/sh\necho nats-server: v2.9.10\n")
    old.chmod(0o755)
    monkeypatch.setenv("NATS_SERVER", str(old))

    with pytest.raises(UserError, match=r"v2\.9\.10, need v2\.12\.7 or newer: older ones silently ignore"):
        find_binary()


def start_launcher(directory: Path) -> tuple["subprocess.Popen[str]", int]:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert launcher.stdout is not None
    for line in launcher.stdout:  # the log comes first
        if line.strip().isdecimal():
            return launcher, int(line)
    raise AssertionError("the launcher did not start its broker")


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="reads the broker's environment in /proc")
@pytest.mark.parametrize("given", ["", "77MiB"])
async def test_the_broker_lets_go_of_what_it_caches_before_it_grows_unless_it_is_told_otherwise(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.delenv("GOMEMLIMIT", raising=False)
    if given:
        monkeypatch.setenv("GOMEMLIMIT", given)

    async with running_broker(settings) as broker:
        words = (await anyio.Path(f"/proc/{broker.pid}/environ").read_bytes()).decode().split("\0")

    in_flight_bytes = server.KEPT_TIMES * settings.rollout.max_groups_in_flight * MESSAGE_BYTES
    bound = given or str(server.MEMORY_BYTES + in_flight_bytes)
    assert [word for word in words if word.startswith("GOMEMLIMIT=")] == [f"GOMEMLIMIT={bound}"]
