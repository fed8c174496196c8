"""GPUs that are hidden are not seen, and a port that is taken is named."""

import os
import random
import re
import socket
import subprocess
import sys

import pytest
import torch

from areal_async.errors import UserError
from areal_async.process import host
from areal_async.process.device import own_device
from areal_async.process.host import (
    LOOPBACK,
    PLACES,
    check_address,
    free_port,
    interface_towards,
    take_gpus,
    visible_gpus,
)
from tests.gpu_drivers import Driver


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("", ()), ("-1", ()), ("2,3", ("2", "3")), (" 1 , 0", ("1", "0")), ("1,-1,0", ("1",)), ("GPU-ab", ("GPU-ab",)),
        ("MIG-ab,MIG-cd", ("MIG-ab", "MIG-cd")),
    ],
)  # fmt: skip
def test_what_the_environment_hides_is_not_seen(
    monkeypatch: pytest.MonkeyPatch, text: str, gpus: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)

    assert visible_gpus() == gpus


GPU = "GPU {}: NVIDIA A100-SXM4-40GB (UUID: GPU-{}0d2bc5a2-0a5c-8a1e-5a0b-1c3a7f0f3f11)"
MIG = "  MIG 3g.20gb     Device  {}: (UUID: MIG-{})"


@pytest.mark.parametrize(
    ("lines", "gpus"),
    [
        ([GPU.format(0, "a")], ("0",)),
        ([GPU.format(0, "a"), GPU.format(1, "b")], ("0", "1")),
        ([GPU.format(0, "a"), MIG.format(0, "x"), MIG.format(1, "y"), GPU.format(1, "b")], ("MIG-x", "MIG-y", "1")),
    ],
)
def test_gpus_are_counted_by_the_driver(driver: Driver, lines: list[str], gpus: tuple[str, ...]) -> None:
    """The only file in /dev has the host's number for what a container has as its first."""
    driver(*lines)

    assert visible_gpus() == gpus


def test_gpus_without_the_drivers_program_are_counted_as_cuda_does(
    monkeypatch: pytest.MonkeyPatch, driver: Driver
) -> None:
    driver()
    assert visible_gpus() == ("0",), "the container's only one is /dev/nvidia3 of the host"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()


def test_a_process_takes_those_of_its_hosts_gpus_whose_places_it_is_told(
    monkeypatch: pytest.MonkeyPatch, driver: Driver
) -> None:
    driver(GPU.format(0, "a"), MIG.format(0, "x"), MIG.format(1, "y"), GPU.format(1, "b"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # remembered, and so put back: what is set below is not
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv(PLACES, "1,2")
    take_gpus()
    assert visible_gpus() == ("MIG-y", "1"), "as the driver has them"
    assert PLACES not in os.environ, "what it starts counts among these"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-b")
    monkeypatch.setenv(PLACES, "0,2")
    take_gpus()
    assert visible_gpus() == ("4", "GPU-b"), "as the host's own variable has them"

    monkeypatch.setenv(PLACES, "2")
    with pytest.raises(UserError, match=r"GPUs: got 2 on host \S+, need 3, as the first host of the run has them; "):
        take_gpus()
    take_gpus()
    assert visible_gpus() == ("4", "GPU-b"), "who is told nothing keeps them all"


def test_a_process_that_was_given_gpus_does_not_compute_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build of torch on a host with GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(
        UserError, match=r"got GPUs 2,3, of which torch \S+ sees 0, need 2; install a build of torch for"
    ):
        own_device(1)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert own_device(1) == torch.device("cpu")


def test_a_process_that_sees_one_of_its_mig_devices_is_told_that_there_is_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA shows a process one of them, whatever it is given, and another build of torch none else."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-x,MIG-y")

    assert own_device(0) == torch.device("cuda", 0)
    with pytest.raises(UserError, match=r"got GPUs MIG-x,MIG-y, .* sees 1, need 2: a process has one MIG device, .*;"):
        own_device(1)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the host is not asked")
def test_the_interface_that_reaches_somebody_is_named() -> None:
    """Debian's name of a host resolves to 127.0.1.1: whoever listens there is reached by nobody else."""
    assert interface_towards("127.0.1.1", 1) == interface_towards(LOOPBACK, 1) == "lo"
    assert interface_towards("no such host", 1) is None


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as server:
        server.bind((LOOPBACK, free_port()))


def test_a_port_whose_last_connections_linger_is_not_drawn_but_can_be_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every server takes such a port; one that starts again on its own does."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((LOOPBACK, free_port()))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection((LOOPBACK, port)):
            server.accept()[0].close()  # who closes first is the one that waits
    monkeypatch.setattr(host, "PORTS", range(port, port + 1))
    monkeypatch.setattr(host, "NUM_TRIES", 1)
    monkeypatch.setattr(host, "_reserve", lambda port: True)

    assert free_port(port) == port
    with pytest.raises(UserError, match="got none of 1 ports"):
        free_port()


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
