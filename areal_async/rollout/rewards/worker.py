"""The far end of ``@reward``: a process that imports functions by location and calls them, one at a time.

    python -m areal_async.rollout.rewards.worker PARENT_PID

Frames on the pipes are a length and msgpack; nothing is pickled, in either direction. Each call is answered
twice: once when the function is imported and prepared, once with its value. Imports neither torch nor transformers.
"""

import importlib
import importlib.util
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from areal_async.errors import ArealError, Reject, RewardError
from areal_async.rollout.rewards.number import finite_number
from areal_async.rollout.rewards.orphans import end_leftovers, fork_below_keeper, helpers
from areal_async.rollout.user_code.boundary import attributed_to, describe, text_of
from areal_async.user_files import add_folder, add_root, import_file

FRAME = "<I"
MAX_ANSWER_BYTES = 1 << 20


class RewardCall(msgspec.Struct, array_like=True):
    """One call of a function that stands at the top level of a file."""

    file: str
    module: str
    qualname: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Answer(msgspec.Struct, array_like=True):
    """A value, or why there is none."""

    value: float = 0.0
    error: str = ""


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer calls until the near end closes its pipe."""
    size = struct.calcsize(FRAME)
    while len(head := requests.read(size)) == size:
        (length,) = struct.unpack(FRAME, head)
        call = msgspec.msgpack.decode(requests.read(length), type=RewardCall)
        spared = set[int]()
        try:
            function = _find(call)
            spared = helpers()
            _send(answers, Answer())
            with attributed_to(RewardError, "raised"):
                value = function(*call.args, **call.kwargs)
                answer = Answer(value=finite_number(value, got="returned", need="a finite number", error=RewardError))
        except (ArealError, Reject) as exc:
            answer = Answer(error=text_of(exc) or type(exc).__name__)  # empty would say that there is none
        except BaseException as exc:  # noqa: BLE001  # sys.exit too: no reason to start another worker
            answer = Answer(error=describe("raised", exc))
        end_leftovers(spared)
        _send(answers, answer)


def _send(answers: BinaryIO, answer: Answer) -> None:
    data = msgspec.msgpack.encode(answer)
    answers.write(struct.pack(FRAME, len(data)) + data)
    answers.flush()


def _find(call: RewardCall) -> Callable[..., Any]:
    function: Any = _module(call)
    for name in call.qualname.split("."):
        function = getattr(function, name, None)
    if function is None:
        raise RewardError(f"there is no {call.qualname} at the top level of {call.file}")
    prepare = getattr(function, "__areal_prepare__", None)
    if prepare is not None:
        with attributed_to(RewardError, f"preparing {call.qualname}"):
            prepare()  # at every call, and does it once
    found: Callable[..., Any] = getattr(function, "__areal_reward__", function)
    return found


def _module(call: RewardCall) -> Any:
    """Import by name where the name leads to the same file (relative imports then work), else by location."""
    if call.module in sys.modules or call.module == "__main__":
        spec = None if call.module == "__main__" else sys.modules[call.module].__spec__
    else:
        if (folder := _folder_of(call)) is not None:
            add_folder(folder)  # what was beside a workflow there has to be found here
        try:
            spec = importlib.util.find_spec(call.module)
        except (ImportError, ValueError):
            spec = None
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(call.file):
        with attributed_to(RewardError, f"importing {call.module}"):
            return importlib.import_module(call.module)
    with attributed_to(RewardError, f"worker: importing {call.file}"):
        return import_file(Path(call.file), what="worker")


def _folder_of(call: RewardCall) -> Path | None:
    """Return the folder from which a function's module was imported by name; ``None`` where it was not."""
    parts = call.module.split(".")
    place = Path(call.file).parent if Path(call.file).name == "__init__.py" else Path(call.file).with_suffix("")
    return place.parents[len(parts) - 1] if place.parts[-len(parts) :] == tuple(parts) else None


def main() -> None:
    """Keep the pipes for ourselves: what user code prints goes to the standard error."""
    fork_below_keeper(int(sys.argv[1]))
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    add_root(Path.cwd())
    os.dup2(2, 1)
    serve(requests, answers)


if __name__ == "__main__":
    main()
