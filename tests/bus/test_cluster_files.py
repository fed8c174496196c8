"""The configuration of three servers that ships is one that nats-server reads, with what its page puts beside it."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from areal_async.bus.accounts import accounts
from areal_async.bus.server import find_binary
from areal_async.protocol.subjects import Names
from tests.brokers import PATIENCE_S

FILES = Path(__file__).parents[2] / "configs" / "deploy" / "nats"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files, with accounts and a certificate."""
    folder = tmp_path / "nats"
    shutil.copytree(FILES, folder)
    (folder / "accounts.json").write_text(json.dumps({"accounts": accounts(Names("gsm8k"), tmp_path / "keys")}))
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2".split()
    names = ["-subj", "/CN=nats-1.example", "-keyout", folder / "server.key", "-out", folder / "server.pem"]
    subprocess.run([*command, *names], check=True, capture_output=True, timeout=PATIENCE_S)
    shutil.copy(folder / "server.pem", folder / "ca.pem")
    return folder


@pytest.mark.parametrize("number", [1, 2, 3])
def test_each_servers_file_is_read_and_syncs_always(folder: Path, number: int) -> None:
    file = folder / f"nats-{number}.conf"

    tried = subprocess.run(
        [find_binary(), "-t", "-c", file], capture_output=True, text=True, timeout=PATIENCE_S, cwd=folder
    )

    assert tried.returncode == 0, tried.stderr
    assert f"nats-{number}.example:4222" in file.read_text()
    assert "sync_interval: always" in (folder / "common.conf").read_text()
