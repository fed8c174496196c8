"""What the proxy is told to do to the bytes of one role happens to them, and to no others."""

import re
import socket
import threading
from collections.abc import Iterator

import pytest

from tools.faults_proxy import ANY_ROLE, Direction, Proxy, Treatment, take_frames

BOTH = tuple(Direction)


@pytest.fixture
def echo_port() -> Iterator[int]:
    """A server that answers every chunk with itself."""
    listener = socket.create_server(("127.0.0.1", 0))

    def echo(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(4096):
                connection.sendall(data)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def connect(proxy: Proxy, role: str) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", proxy.port))
    client.settimeout(60)
    exchange(client, b'CONNECT {"name":"run.%s.0"}\r\n' % role.encode())
    return client


def exchange(client: socket.socket, line: bytes) -> None:
    client.sendall(line)
    received = b""
    while len(received) < len(line):
        received += client.recv(4096)
    assert received == line


def is_silent(client: socket.socket) -> bool:
    client.settimeout(0.2)
    try:
        client.recv(4096)
    except TimeoutError:
        return True
    else:
        return False
    finally:
        client.settimeout(60)


def test_held_bytes_of_one_role_arrive_after_the_heal_and_others_pass(echo_port: int) -> None:
    with Proxy(echo_port) as proxy, connect(proxy, "node") as node, connect(proxy, "trainer") as trainer:
        proxy.inject(["node"], BOTH, Treatment.HOLD)
        node.sendall(b"PING\r\n")

        assert is_silent(node)
        exchange(trainer, b"PING\r\n")
        proxy.heal()
        assert node.recv(4096) == b"PING\r\n"


def test_a_connection_that_lost_bytes_is_cut_at_the_heal(echo_port: int) -> None:
    with Proxy(echo_port) as proxy, connect(proxy, "node") as node:
        proxy.inject([ANY_ROLE], [Direction.TO_CLIENT], Treatment.LOSE)
        node.sendall(b"PING\r\n")

        assert is_silent(node)
        proxy.heal()
        assert node.recv(4096) == b""


def test_the_client_of_a_half_open_connection_is_told_nothing(echo_port: int) -> None:
    with Proxy(echo_port) as proxy, connect(proxy, "node") as node:
        proxy.cut("node", half_open=True)
        node.sendall(b"PING\r\n")

        assert is_silent(node)
        proxy.heal()
        assert node.recv(4096) == b""


def test_only_messages_on_the_subject_are_lost_and_delayed_ones_are_overtaken(echo_port: int) -> None:
    lost, late, other = (b"MSG %s 1 2\r\nab\r\n" % subject for subject in (b"a.lost", b"a.late", b"a.other"))
    with Proxy(echo_port) as proxy, connect(proxy, "node") as node:
        proxy.inject_messages("node", re.escape("a.lost"), delay_s=None)
        proxy.inject_messages("node", re.escape("a.late"), delay_s=0.1)
        node.sendall(lost + late + other)

        received = b""
        while len(received) < len(late + other):
            received += node.recv(4096)
        assert received == other + late
        assert proxy.num_frames_hit == 2


def test_frames_are_taken_whole_however_they_arrive() -> None:
    stream = b"INFO {}\r\nHMSG s 1 r 4 6\r\nabcd\r\n\r\nPONG\r\n"
    whole = [frame.data for frame in take_frames(bytearray(stream))]

    buffer, taken = bytearray(), []
    for byte in stream:
        buffer.append(byte)
        taken += [frame.data for frame in take_frames(buffer)]

    assert taken == whole
    assert b"".join(whole) == stream
