"""Which versions there are of what a run stands on."""

import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from areal_async.bus.server import find_binary
from areal_async.config.settings import Settings
from areal_async.doctor.preflight.findings import PreflightFinding, error, good, warning
from areal_async.inference.commands import choose_backend

SHOWN = ("torch", "transformers", "datasets", "nats-py", "httpx", "uvloop")
MIN_SGLANG = (0, 5, 23)
PROBE_DEADLINE_S = 60.0


def check_versions(settings: Settings) -> Iterator[PreflightFinding]:
    """Name the interpreter, the libraries and the broker's program."""
    names = ", ".join(f"{name} {metadata.version(name)}" for name in SHOWN)
    ours = f"areal-async {metadata.version('areal-async')}, Python {platform.python_version()}"
    yield good("versions", f"{ours}, {names}")
    if settings.bus.url == "embedded":
        yield good("nats-server", str(find_binary()))


def check_server_program(settings: Settings) -> Iterator[PreflightFinding]:
    """Ask the servers' interpreter for its SGLang, where that is what serves."""
    if choose_backend(settings.inference) != "sglang":
        yield good("inference", "the embedded engine serves")
        return
    python = str(settings.inference.python or sys.executable)
    version = _sglang_version(python)
    cure = "install SGLang there (on a CPU: python tools/setup_sglang.py), or set inference.backend=embedded"
    if version is None:
        yield error("inference", f"{python} has no SGLang", cure)
    elif tuple(int(part) for part in version.split(".")[:3] if part.isdecimal()) < MIN_SGLANG:
        need = ".".join(map(str, MIN_SGLANG))
        yield warning("inference", f"{python} has SGLang {version}, older than {need}", "install a newer one there")
    else:
        yield good("inference", f"SGLang {version} in {Path(python)}")


def check_compiler(settings: Settings) -> Iterator[PreflightFinding]:
    """Compile something as the trainer would, where it compiles."""
    if settings.trainer.compile:
        # Imported here: it takes seconds.
        from areal_async.trainer.engine import compiled

        yield good("compiler", compiled.check_compiler())


def _sglang_version(python: str) -> str | None:
    code = "import importlib.metadata as m, json; print(json.dumps(m.version('sglang')))"
    try:
        answer = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=PROBE_DEADLINE_S, check=True
        )
        return str(json.loads(answer.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
