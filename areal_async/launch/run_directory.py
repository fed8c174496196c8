"""The directory of one run: what the launcher leaves there for the roles, and who may use it.

run.lock       held by the one that uses it: its launcher, or a command that looks into a run which has none
launcher.lock  held by its launcher as well: by that it is told from one who looks, never by what a file says
config.yaml    every setting, resolved: what the roles read
bus/url        where the broker is
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from areal_async.bus import HeldError, is_locked
from areal_async.errors import UserError
from areal_async.fields import is_version
from areal_async.settings import DATA_DEFINING, RunSettings, Settings
from areal_async.settings_paths import with_real_paths
from areal_async.settings_sources import dump_settings, load_settings
from areal_async.settings_yaml import NOT_YAML
from areal_async.types import Version


class LiveError(HeldError):
    """A launcher runs the run."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths and files of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def lock(self) -> Path:
        return self.path / "run.lock"

    @property
    def launcher_lock(self) -> Path:
        return self.path / "launcher.lock"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpointed_step(self) -> int:
        """The newest training step that a checkpoint holds; 0 when none does."""
        names = [path.name for path in (self.path / "checkpoints").glob("*")]
        return max((Version.parse(name).step for name in names if is_version(name)), default=0)

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.config.is_file()

    @property
    def is_live(self) -> bool:
        """Whether a launcher runs this run now; a process that only looks into a stopped one makes none live."""
        return is_locked(self.launcher_lock)

    @contextmanager
    def locked(self, name: str, *, is_visit: bool = False) -> Iterator[None]:
        """Hold the directory, made when missing, until the block or this process ends.

        Args:
            is_visit: only to look into a run that does not live.

        Raises:
            LiveError: a launcher holds it.
            HeldError: another process looks into it, or is asking at this moment whether it lives.
            UserError: it cannot be made, or not be written.
        """
        with ExitStack() as held:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context(open(self.lock, "a+"))
            except OSError as exc:
                raise UserError(
                    f"run {name}: got the directory {self.path}, need one that can be written: {exc.strerror}; "
                    "choose another --run.directory"
                ) from exc
            if not _has_locked(lock):
                raise self._error_of_holder(name)
            _sign(lock)
            if not is_visit:
                launcher = held.enter_context(open(self.launcher_lock, "a+"))
                _sign(launcher)  # before it is locked: who finds it so reads whose it is
                if not _has_locked(launcher):
                    raise HeldError(f"run {name}: another process looks at it; try again")
            yield

    def _error_of_holder(self, name: str) -> HeldError:
        if self.is_live:
            pid = self.launcher_lock.read_text() or "unknown"
            return LiveError(f"run {name}: already running in process {pid}; stop it, or choose another --run.name")
        return HeldError(
            f"run {name}: process {self.lock.read_text() or 'unknown'} looks into it; try again when it has ended"
        )

    def clear(self) -> None:
        """Remove all that earlier starts left. Call with the lock held.

        Raises:
            UserError: there are files, but no run that could have left them.
        """
        items = [item for item in self.path.iterdir() if item not in (self.lock, self.launcher_lock)]
        if items and not self.exists:
            raise UserError(f"{self.path}: holds files but no run; remove it yourself, or choose another --run.name")
        for item in items:
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            else:
                item.unlink()

    def refuse_changed_data(self, settings: Settings) -> None:
        """Check that going on with these settings continues the same run.

        Raises:
            UserError: a setting that defines the data differs from the one the run was started with, or that cannot
                be read.
        """
        try:
            before = yaml.safe_load(self.config.read_text(encoding="utf-8"))
        except (OSError, *NOT_YAML) as exc:
            raise UserError(f"{self.config}: cannot be read: {exc}; --fresh starts anew") from exc
        # What the file has not was not there yet when the run was started: it was as it is by default.
        was = _named(with_real_paths(Settings().model_dump(mode="json"), Settings)) | _named(
            with_real_paths(before, Settings)
        )
        now = _named(with_real_paths(settings.model_dump(mode="json"), Settings))
        if changed := [name for name in was | now if was.get(name) != now.get(name)]:
            told = "; ".join(f"{name} was {was.get(name)!r}, is {now.get(name)!r}" for name in changed)
            raise UserError(
                f"run {settings.run.name}: {told}; a resumed run keeps its data: put back what was, "
                "choose another --run.name, or give --fresh to start anew"
            )

    def write_settings(self, settings: Settings) -> None:
        """Leave the resolved settings for the roles."""
        _write(self.config, dump_settings(settings))

    def read_settings(self) -> Settings:
        """Read what the launcher resolved; the environment was heard then and is not asked again.

        Raises:
            UserError: there is no run here, or the file was damaged.
        """
        return load_settings(self.config, use_environment=False)

    def write_bus_url(self, url: str) -> None:
        """Leave the broker's address for the roles."""
        _write(self.path / "bus" / "url", url + "\n")

    def find_bus_url(self) -> str | None:
        """Return the broker's address; None before the run's first broker is up."""
        path = self.path / "bus" / "url"
        return path.read_text(encoding="utf-8").strip() if path.exists() else None

    def read_bus_url(self) -> str:
        """Read the broker's address.

        Raises:
            UserError: the run was never started.
        """
        path = self.path / "bus" / "url"
        try:
            return path.read_text(encoding="utf-8").strip()
        except OSError as exc:
            raise UserError(f"{path}: cannot be read; start the run first") from exc


def find_run(name: str) -> RunDirectory:
    """Return the directory of a run: the one of that name among the runs here, or the one that is at that path.

    Raises:
        UserError: no run there.
    """
    runs = RunSettings().directory
    for path in (runs / name, Path(name)):
        directory = RunDirectory(path.absolute())
        if directory.exists:
            return directory
    raise UserError(f"--run: got {name}, need the name of a run in {runs}, or a run's directory")


def _has_locked(file: IO[str]) -> bool:
    """Say whether a file is this process's now, for as long as it is open; never wait for those who have it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(lock: IO[str]) -> None:
    """Leave this process's number in a lock file, for people."""
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()


def _named(data: Any) -> dict[str, Any]:
    """Return what ``data`` says of the settings that define a run's data, by name."""
    found = {place: value for name in DATA_DEFINING for place, value in _values_at(data, name.split("."))}
    return {name: value for name, value in found.items() if value is not None}


def _values_at(data: Any, parts: Sequence[str], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of a setting, of each item where a list is on the way."""
    if not parts:
        yield above, data
    elif parts[0] == "*":
        for index, item in enumerate(data if isinstance(data, list) else ()):
            yield from _values_at(item, parts[1:], f"{above}.{index}")
    else:
        inner = data.get(parts[0]) if isinstance(data, dict) else None
        yield from _values_at(inner, parts[1:], f"{above}.{parts[0]}" if above else parts[0])


def _write(path: Path, text: str) -> None:
    """Write under another name, sync, rename: a reader never sees half a file, nor does one after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
