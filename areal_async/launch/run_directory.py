"""The directory of one run: what the launcher leaves there for the roles, and who may use it.

run.lock       held by the one that uses it: its launcher, or a command that looks into a run which has none
launcher.lock  held by its launcher as well: by that it is told from one who looks, never by what a file says
config.yaml    every setting, resolved: what the roles read, and what a run that goes on has
sources.yaml   what the settings file and the environment said, to be told from what they say at the next start
bus/url        where the broker is

Invariant: until a prompt was admitted there is no run. What a first start wrote goes again, and the name is free.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

from areal_async.bus.inspection import HeldError, VisitedError, is_locked
from areal_async.config.settings import RunSettings, Settings
from areal_async.config.sources import dump_settings, load_settings
from areal_async.config.strict_yaml import NOT_YAML
from areal_async.errors import UserError, leaves_of
from areal_async.process.atomic_folders import versions_in, write_whole
from areal_async.process.file_locks import sign, try_lock
from areal_async.versions import registry


class LiveError(HeldError):
    """A launcher runs the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsSources:
    """What the sources of a run's settings said, besides the command line."""

    config: str = ""
    """The settings file; empty for none."""
    file: dict[str, Any] = field(default_factory=dict)
    """Name of a setting or a section -> what that file gave it."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Name of a setting or a section -> what the environment gave it."""


@dataclass(slots=True)
class FirstStart:
    """A start of a run that nobody has started before."""

    has_begun: bool = False
    """A prompt was admitted, or may have been: what there is stays."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths and files of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def sources(self) -> Path:
        return self.path / "sources.yaml"

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
        """The training step of the newest checkpoint; 0 when there is none."""
        return next((version.step for version in reversed(versions_in(self.path / "checkpoints"))), 0)

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
            VisitedError: another process looks into it, or is asking at this moment whether it lives.
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
            if not try_lock(lock):
                raise self._error_of_holder(name)
            if not _is_at(lock, self.lock):
                raise VisitedError(f"run {name}: another process has taken its directory away; try again")
            sign(lock)
            if not is_visit:
                launcher = held.enter_context(open(self.launcher_lock, "a+"))
                sign(launcher)  # before it is locked: who finds it so reads whose it is
                if not try_lock(launcher):
                    raise VisitedError(f"run {name}: another process looks at it; try again")
            yield

    def _error_of_holder(self, name: str) -> HeldError:
        if self.is_live:
            pid = self.launcher_lock.read_text() or "unknown"
            return LiveError(f"run {name}: already running in process {pid}; stop it, or choose another --run.name")
        return VisitedError(
            f"run {name}: process {self.lock.read_text() or 'unknown'} looks into it; try again when it has ended"
        )

    def clear(self) -> None:
        """Remove all that earlier starts left. Call with the lock held.

        Raises:
            UserError: there are files, but no run that could have left them; or answers that users were given.
        """
        items = self._items()
        if any(any((self.path / "served").glob(f"{name}-*.jsonl")) for name in ("answers", "feedback")):
            raise UserError(
                f"run --fresh: got {self.path / 'served'} with recorded answers or feedback of users, which it would "
                "remove; move that folder elsewhere first, or remove it"
            )
        if items and items != [self.logs] and not self.exists:
            raise UserError(f"{self.path}: holds files but no run; remove it yourself, or choose another --run.name")
        for item in items:
            _remove(item)

    @contextmanager
    def first_start(self) -> Iterator[FirstStart]:
        """Take away what the block leaves here, unless it says that the run has begun. Call with the lock held.

        What was here before stays, and so do the logs where an error sends its reader to them.
        """
        theirs, start = self._items(), FirstStart()
        has_logs = False
        try:
            yield start
        except BaseException as exc:
            leaves, logs = leaves_of(exc), str(self.logs.relative_to(self.path.parent))
            has_logs = not any(isinstance(leaf, UserError) for leaf in leaves) or any(
                logs in str(leaf) for leaf in leaves
            )
            raise
        finally:
            if not start.has_begun:
                for item in self._items():
                    if item not in theirs and not (has_logs and item == self.logs):
                        _remove(item)
                if not self._items():  # nothing but our own locks
                    self.launcher_lock.unlink(missing_ok=True)
                    self.lock.unlink(missing_ok=True)
                    self.path.rmdir()

    def exported_version(self, name: str) -> str:
        """Return the version of a model that was exported at the run's end; empty where no checkpoint tells."""
        return registry.exported_version(self.path, name)

    def set_models_aside(self) -> list[str]:
        """Give what was exported at the run's end the names of what it is, before it goes on; return these."""
        kept = []
        for name in ("model", "adapter", "model_best"):
            folder, version = self.path / name, self.exported_version(name)
            if not folder.is_dir() or not version:
                continue
            aside = self.path / f"{name.removesuffix('_best')}_{version}"
            if aside.exists():  # the same, exported by hand
                _remove(folder)
            else:
                folder.rename(aside)
            kept.append(aside.name)
        return kept

    def _items(self) -> list[Path]:
        return [item for item in self.path.iterdir() if item not in (self.lock, self.launcher_lock)]

    def write_settings(self, settings: Settings) -> None:
        """Leave the resolved settings for the roles."""
        write_whole(self.config, dump_settings(settings).encode())

    def write_code(self, files: Mapping[str, str]) -> None:
        """Leave the SHA-256 of each file of the run's workflows, by its path."""
        write_whole(self.path / registry.CODE, json.dumps(dict(files), indent=1).encode())

    def read_settings(self) -> Settings:
        """Read what the launcher resolved; the environment was heard then and is not asked again.

        Raises:
            UserError: there is no run here, or the file was damaged.
        """
        return load_settings(self.config, use_environment=False)

    def write_said(self, said: SettingsSources) -> None:
        """Leave what the sources say, for the next start."""
        text = yaml.safe_dump(asdict(said), sort_keys=False, allow_unicode=True)
        write_whole(self.sources, text.encode())

    def read_said(self) -> SettingsSources | None:
        """Return what the sources said at the start before; None where that is not known.

        Raises:
            UserError: the file was damaged.
        """
        if not self.sources.exists():
            return None
        try:
            return SettingsSources(**yaml.safe_load(self.sources.read_text(encoding="utf-8")))
        except (OSError, TypeError, *NOT_YAML) as exc:
            raise UserError(f"{self.sources}: cannot be read: {exc}; remove it") from exc

    def write_bus_url(self, url: str) -> None:
        """Leave the broker's address for the roles."""
        write_whole(self.path / "bus" / "url", f"{url}\n".encode())

    def find_bus_url(self) -> str | None:
        """Return the broker's address; None before the run's first broker is up."""
        path = self.path / "bus" / "url"
        return path.read_text(encoding="utf-8").strip() if path.exists() else None

    def read_bus_url(self) -> str:
        """Read the broker's address.

        Raises:
            UserError: the run was never started.
        """
        url = self.find_bus_url()
        if url is None:
            raise UserError(f"{self.path / 'bus' / 'url'}: cannot be read; start the run first")
        return url


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


def _is_at(file: IO[str], path: Path) -> bool:
    """Say whether an open file is still the one at its path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove(item: Path) -> None:
    if item.is_dir() and not item.is_symlink():
        shutil.rmtree(item)
    else:
        item.unlink()
