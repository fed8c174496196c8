"""Harbor's task folders, read and checked.

    NAME/
      instruction.md      what the agent is asked
      task.toml           deadlines and limits
      environment/        files of the task, and a Dockerfile where it wants an image of its own
      tests/test.sh       leaves /logs/verifier/reward.txt, or reward.json
      solution/solve.sh   what an agent that knows would do

All of it is bounded: a folder that is too large, or holds what is neither a file nor a folder, is refused. A task is
known by the name of its folder, wherever that lies.

Source: the task format of Harbor, https://harborframework.com/docs/tasks.
"""

import hashlib
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from areal_async.errors import UserError

MAX_TASKS: Final = 10_000
MAX_FILES: Final = 2_000
MAX_FOLDER_BYTES: Final = 64 << 20
MAX_TEXT_BYTES: Final = 256 << 10
"""Of ``instruction.md`` and of ``task.toml``."""
MAX_VARIABLES, MAX_VARIABLE = 32, 4096
"""Of an ``env``: how many, and characters of one's value."""
MIB: Final = 1 << 20
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_WANTS_IMAGE = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml", "compose.yaml")


class _Timed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
    timeout_sec: float = Field(default=600.0, gt=0, le=86_400)
    env: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")],
        Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=MAX_VARIABLE)],
    ] = Field(default={}, max_length=MAX_VARIABLES)


class _Place(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
    docker_image: str = ""
    memory_mb: int | None = Field(default=None, ge=16, le=1 << 20)
    storage_mb: int | None = Field(default=None, ge=16, le=1 << 20)
    memory: str = Field(default="", pattern=r"^(\d{1,6}(\.\d{1,3})?[KMG])?$")
    storage: str = Field(default="", pattern=r"^(\d{1,6}(\.\d{1,3})?[KMG])?$")

    def bytes_of(self, name: str, otherwise: int) -> int:
        """Return ``memory`` or ``storage``, in either of the two forms that task files have."""
        if (number := getattr(self, f"{name}_mb")) is not None:
            return int(number) * MIB
        text = str(getattr(self, name))
        return int(float(text[:-1]) * _UNITS[text[-1]]) if text else otherwise


class _TaskFile(BaseModel):
    """``task.toml``, as far as it is used; what else it says is of no concern here."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    agent: _Timed = _Timed()
    verifier: _Timed = _Timed()
    solution: _Timed = _Timed()
    environment: _Place = _Place()


@dataclass(frozen=True, kw_only=True, slots=True)
class HarborTask:
    """One task folder."""

    name: str
    folder: Path
    instruction: str
    settings: _TaskFile
    sha256: str
    """Of all its files: names, contents, and which may be run."""

    @property
    def has_solution(self) -> bool:
        """Whether what an agent that knows would do is there."""
        return (self.folder / "solution/solve.sh").is_file()

    @property
    def wants_image(self) -> bool:
        """Whether it is to run in an image that is built or pulled for it."""
        place = self.folder / "environment"
        return bool(self.settings.environment.docker_image) or any((place / name).exists() for name in _WANTS_IMAGE)

    def files(self, part: str) -> Iterator[tuple[str, bytes, int]]:
        """Yield the files below one of its folders: path below that, content, mode."""
        root = self.folder / part
        for path, status in sorted(_walk(root)):
            yield str(path.relative_to(root)), path.read_bytes(), 0o755 if status.st_mode & 0o100 else 0o644


def read_tasks(place: Path, *, what: str) -> Iterator[HarborTask]:
    """Yield the tasks of a folder, by their names in order; it may be a single task itself.

    Raises:
        UserError: there is none, or one is none that can be.
    """
    if (place / "task.toml").is_file():
        yield read_task(place, what=what)
        return
    names = sorted(one.name for one in place.iterdir() if _is_task(one)) if place.is_dir() else []
    if not names:
        raise UserError(f"{what}: got {place} without a task, need a folder with a task.toml, or one of such folders")
    if len(names) > MAX_TASKS:
        raise UserError(f"{what}: got {len(names):,} tasks, need at most {MAX_TASKS:,}; take a part of them")
    for name in names:
        yield read_task(place / name, what=what)


def task_folder(place: Path, name: str) -> Path:
    """Return where the task of this name is, of those that ``read_tasks`` yields."""
    return place if (place / "task.toml").is_file() else place / name


def read_task(folder: Path, *, what: str) -> HarborTask:
    """Return one task.

    Raises:
        UserError: something of it is missing, too large, or not as it should be; says what.
    """
    name = Path(os.path.abspath(folder)).name
    where = f"{what}: task {_shown(name)}"
    if not name.isprintable():
        raise UserError(f"{where}: got a name with characters that cannot be shown, need another one")
    try:
        files = sorted(_checked(folder, where))
        for needed in ("task.toml", "instruction.md", "tests/test.sh"):
            if not (folder / needed).is_file():
                raise UserError(f"{where}: got no {needed}, need one")
        return HarborTask(
            name=name,
            folder=folder,
            instruction=_text(folder / "instruction.md", where),
            settings=_settings(_text(folder / "task.toml", where), where),
            sha256=_hash(folder, files),
        )
    except OSError as exc:
        raise UserError(f"{where}: {_shown(str(exc.filename))} cannot be read: {exc.strerror}") from exc


def _is_task(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("task.toml", "instruction.md"))


def _settings(text: str, where: str) -> _TaskFile:
    try:
        return _TaskFile.model_validate(tomllib.loads(text))
    except ValidationError as exc:
        first = exc.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{where}: task.toml: {place}: got {first['input']!r:.80}: {first['msg']}") from exc
    except (ValueError, RecursionError) as exc:
        raise UserError(f"{where}: task.toml: {exc}") from exc


def _checked(folder: Path, where: str) -> Iterator[tuple[Path, os.stat_result]]:
    num_files = num_bytes = 0
    for path, status in _walk(folder):
        if not stat.S_ISREG(status.st_mode):
            raise UserError(
                f"{where}: got {_shown(str(path.relative_to(folder)))}, which is no regular file; put a file there"
            )
        num_files, num_bytes = num_files + 1, num_bytes + status.st_size
        if num_files > MAX_FILES or num_bytes > MAX_FOLDER_BYTES:
            raise UserError(
                f"{where}: got more than {MAX_FILES:,} files or {MAX_FOLDER_BYTES // MIB} MiB, need at most so many"
            )
        yield path, status


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for root, folders, names in os.walk(folder, onerror=_raise):
        links = [name for name in folders if Path(root, name).is_symlink()]  # they are not gone into
        for name in names + links:
            path = Path(root, name)
            yield path, path.lstat()


def _raise(error: OSError) -> None:
    raise error


def _shown(name: str) -> str:
    return name if name.isprintable() else ascii(name)


def _hash(folder: Path, files: list[tuple[Path, os.stat_result]]) -> str:
    digest = hashlib.sha256()
    for path, status in files:
        content = path.read_bytes()
        head = f"{path.relative_to(folder).as_posix()}\0{bool(status.st_mode & 0o100)}\0{len(content)}\0"
        digest.update(head.encode(errors="surrogateescape") + content)
    return digest.hexdigest()


def _text(path: Path, where: str) -> str:
    if (size := path.stat().st_size) > MAX_TEXT_BYTES:
        raise UserError(f"{where}: {path.name}: got {size:,} bytes, need at most {MAX_TEXT_BYTES:,}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise UserError(f"{where}: {path.name}: {exc}") from exc


def reward_of(text: bytes | None, table: Mapping[str, Any] | None) -> float | None:
    """Return the reward that ``reward.txt`` or ``reward.json`` says; None for what is no finite number."""
    value: Any = text
    if table is not None:
        value = table.get("reward") if "reward" in table or len(table) != 1 else next(iter(table.values()))
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None
