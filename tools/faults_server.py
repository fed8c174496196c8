"""A broker that belongs to no run: configured as the embedded one is, but without keys, as behind a proxy."""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_async.bus.broker_config import write_config
from areal_async.bus.server import find_binary
from areal_async.config.settings import RunSettings, Settings
from areal_async.process.host import LOOPBACK, free_port
from tools.faults_run import FaultFailed

START_DEADLINE_S = 20.0


@contextmanager
def running_server(directory: Path) -> Iterator[int]:
    """Run a broker with its store in ``directory``; give its port."""
    settings = Settings(run=RunSettings(name="broker", directory=directory))
    config = settings.run_directory / "nats.conf"
    config.parent.mkdir(parents=True)
    port, http_port = free_port(), free_port()
    write_config(settings, path=config, port=port, http_port=http_port)
    without_keys = json.loads(config.read_text())
    del without_keys["accounts"]
    config.write_text(json.dumps(without_keys))
    with open(directory / "nats.log", "ab") as output:
        process = subprocess.Popen([str(find_binary()), "-c", str(config)], stdout=output, stderr=output)
    try:
        _wait_healthy(http_port)
        yield port
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.terminate()
        process.wait()


def _wait_healthy(http_port: int) -> None:
    ends_at = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < ends_at:
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{http_port}/healthz", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.05)
    raise FaultFailed(f"broker: not healthy within {START_DEADLINE_S:g} s")
