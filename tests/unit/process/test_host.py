"""GPUs that are hidden are not seen, and a port that is taken is named."""

import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from areal_async.errors import UserError
from areal_async.process import host
from areal_async.process.host import LOOPBACK, check_address, free_port, visible_gpus


@pytest.mark.parametrize(("text", "gpus"), [("", ()), ("-1", ()), ("2,3", ("2", "3")), ("GPU-ab", ("GPU-ab",))])
def test_what_the_environment_hides_is_not_seen(
    monkeypatch: pytest.MonkeyPatch, text: str, gpus: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)

    assert visible_gpus() == gpus


def test_gpus_are_found_as_devices_in_the_order_of_their_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()

    assert visible_gpus(tmp_path) == ("0", "2", "10")


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as server:
        server.bind((LOOPBACK, free_port()))


def test_two_processes_with_one_seed_draw_different_ports() -> None:
    drawn = []
    for _ in range(2):
        random.seed(0)
        drawn.append([free_port() for _ in range(5)])

    assert drawn[0] != drawn[1]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody knows what others have drawn")
def test_no_two_processes_draw_a_port_before_its_server_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    monkeypatch.setattr(host, "PORTS", range(first, first + 20))
    monkeypatch.setattr(host, "NUM_TRIES", 20)
    code = f"from areal_async.process import host; host.PORTS, host.NUM_TRIES = range({first}, {first + 20}), 20; "

    ours = {first, *(free_port() for _ in range(9))}
    draw = [sys.executable, "-c", f"{code}print(*[host.free_port() for _ in range(5)])"]
    theirs = [*map(int, subprocess.run(draw, capture_output=True, text=True, check=True).stdout.split())]

    assert len(ours) == 10
    assert len({*theirs} - ours) == 5


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is held")
def test_a_process_holds_the_newest_ports_that_it_has_drawn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "NUM_RESERVED", 2)
    oldest, *_ = [free_port() for _ in range(3)]
    monkeypatch.setattr(host, "PORTS", range(oldest, oldest + 1))
    monkeypatch.setattr(host, "NUM_TRIES", 1)

    assert free_port() == oldest
    with pytest.raises(UserError, match="got none of 1 ports"):
        free_port()


def test_a_taken_port_is_refused_by_the_name_of_its_setting() -> None:
    with socket.socket() as server:
        server.bind((LOOPBACK, 0))
        server.listen()
        port = server.getsockname()[1]

        with pytest.raises(UserError, match=f"bus.port: port {port} .* is taken"):
            free_port(port, setting="bus.port")


@pytest.mark.parametrize(
    "host", ["192.0.2.77", "0.0.0.0", "0", "::", "::1", "[::1]", "no name", "no-such-host.invalid", "a..b"]
)
def test_an_address_that_no_other_host_could_be_given_is_refused_by_the_name_of_its_setting(host: str) -> None:
    with pytest.raises(UserError, match=f"bus.host: got '{re.escape(host)}', need an IPv4 address or a name of this h"):
        check_address(host, setting="bus.host")


@pytest.mark.parametrize("host", [LOOPBACK, "localhost", socket.gethostname()])
def test_an_address_of_this_host_passes(host: str) -> None:
    check_address(host, setting="bus.host")
