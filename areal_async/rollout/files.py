"""Import a user's Python file by its location.

Only the root (the working directory) is on the path, never the file's own folder, so that a file named
``coding.py`` or ``random.py`` shadows nothing.
"""

import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType

from areal_async.errors import ArealError
from areal_async.rollout.boundary import attributed_to


def load_file(path: Path, *, error: type[ArealError], what: str, root: Path | None = None) -> ModuleType:
    """Return the module in ``path``, imported once per process.

    Raises:
        ArealError: of type ``error``: there is no such file, or running it raised.
    """
    location = path.resolve()
    if not location.is_file():
        raise error(f"{what}: there is no file {path}")
    root_entry = str((root or Path.cwd()).resolve())
    if root_entry not in sys.path:
        sys.path.insert(0, root_entry)
    # The name is private: a user's file must not replace a module that someone else imports by name.
    name = f"areal_async_file_{location.stem}_{zlib.crc32(str(location).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, location)
    if spec is None or spec.loader is None:
        raise error(f"{what}: got {path}, need a Python file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    is_loaded = False
    try:
        with attributed_to(error, f"{what}: importing {path}"):
            spec.loader.exec_module(module)
        is_loaded = True
    finally:
        if not is_loaded:
            del sys.modules[name]
    return module
