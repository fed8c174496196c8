"""Build an environment in which the real SGLang server runs on a CPU; needs pip and a package index, nothing else.

    python tools/setup_sglang.py [.venv-sglang]

SGLang's own dependencies ask for CUDA packages and for a torch that brings them, so they are installed by our list,
and three small modules stand in for what a CPU cannot load (``tools/sglang_cpu``). Takes about two minutes and 3 GB; a
folder that is up to date is left as it is.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

TORCH = "torch==2.13.0"
"""Alone and first, exactly this version: the newest torch that SGLang's CPU path works with."""
WITHOUT_DEPENDENCIES = ("sglang==0.5.23", "torchvision==0.28.0", "xgrammar==0.2.7")
PARTS = Path(__file__).parent / "sglang_cpu"
STAND_INS = ("vllm", "torchvision_without_operators.py", "speculation_without_operators.py")
RUN_AT_START = ("torchvision_without_operators", "speculation_without_operators")
MIN_FREE_BYTES = 6 << 30
INSTALL_DEADLINE_S = 1800.0
CHECK_DEADLINE_S = 300.0


class SetupError(Exception):
    """The reason for which there is no environment, in one sentence."""


def main() -> int:
    """Build it, or say why not; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(".venv-sglang"))
    folder: Path = parser.parse_args().folder
    try:
        build(folder)
    except SetupError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    print(f"SGLang on the CPU: {folder}/bin/python")
    return 0


def build(folder: Path) -> None:
    """Build the environment in ``folder`` unless it is there already.

    Raises:
        SetupError: it cannot be built here.
    """
    stamp = folder / ".installed"
    fingerprint = _fingerprint()
    if stamp.is_file() and stamp.read_text() == fingerprint:
        return
    _check_host(folder)
    try:
        venv.create(folder, clear=True, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        raise SetupError(f"environment {folder}: cannot be made: {exc}; install python3-venv and pip") from exc
    _install(folder, [TORCH])
    _install(folder, ["-r", str(PARTS / "requirements.txt")])
    _install(folder, ["--no-deps", *WITHOUT_DEPENDENCIES])
    _add_stand_ins(folder)
    _check_import(folder)
    stamp.write_text(fingerprint)


def _fingerprint() -> str:
    """Return what changes whenever the environment would come out differently."""
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted([Path(__file__), *(path for path in PARTS.rglob("*") if path.suffix in (".py", ".txt"))]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _check_host(folder: Path) -> None:
    if not sys.platform.startswith("linux"):
        raise SetupError(f"SGLang on the CPU: got {sys.platform}, need Linux; use inference.backend: embedded")
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise SetupError(f"SGLang on the CPU: got Python {sys.version.split()[0]}, need 3.11 to 3.13")
    num_free_bytes = shutil.disk_usage(folder.absolute().parent).free
    if num_free_bytes < MIN_FREE_BYTES:
        raise SetupError(
            f"disk of {folder.absolute().parent}: got {num_free_bytes >> 20} MiB free, need {MIN_FREE_BYTES >> 20} MiB"
        )


def _install(folder: Path, arguments: Iterable[str]) -> None:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input"]
    what = " ".join(arguments)
    print(f"installing {what}", flush=True)
    _run([*pip, "install", "--no-compile", *arguments], f"installing {what}", deadline_s=INSTALL_DEADLINE_S)


def _add_stand_ins(folder: Path) -> None:
    site_packages = next((folder / "lib").glob("python3.*/site-packages"))
    for name in STAND_INS:
        source = PARTS / name
        if source.is_dir():
            shutil.copytree(source, site_packages / name, dirs_exist_ok=True)
        else:
            shutil.copy(source, site_packages / name)
    for name in RUN_AT_START:
        (site_packages / f"{name}.pth").write_text(f"import {name}\n")


def _check_import(folder: Path) -> None:
    command = [str(folder / "bin" / "python"), "-m", "sglang.launch_server", "--help"]
    _run(command, "trying SGLang", deadline_s=CHECK_DEADLINE_S)


def _run(command: list[str], what: str, *, deadline_s: float) -> None:
    try:
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise SetupError(f"{what}: not done within {deadline_s:g} s; look at the network and run it again") from exc
    if ended.returncode != 0:
        lines = [line for line in ended.stdout.splitlines() if line.strip()]
        raise SetupError(f"{what}: failed with status {ended.returncode}: {' | '.join(lines[-3:])}")


if __name__ == "__main__":
    sys.exit(main())
