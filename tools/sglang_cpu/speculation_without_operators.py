"""Let SGLang's speculative modes run in Triton's interpreter; run by a ``.pth`` file when the interpreter starts.

Three of their modules take operators that are compiled for a GPU, or ``sgl_kernel``'s, which is not installed here. On
an XPU they take Triton kernels of their own instead; with ``TRITON_INTERPRET=1`` they, and nothing else, believe that
this is one. Without that variable nothing is changed.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

MODULES = {f"sglang.kernels.ops.speculative.{name}" for name in ("spec_tree", "cache_locs", "reconstruct_tree")}


class OnXpu(SourceFileLoader):
    """Imports a module that asks once, as it is imported, whether it runs on an XPU."""

    def exec_module(self, module: ModuleType) -> None:
        import_module("sglang.srt.platforms")  # which asks as well, and comes first
        utils: Any = import_module("sglang.srt.utils")
        is_xpu, utils.is_xpu = utils.is_xpu, lambda: True
        try:
            super().exec_module(module)
        finally:
            utils.is_xpu = is_xpu


class Finder(PathFinder):
    """Finds these modules where they are, and has them imported so."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target) if fullname in MODULES else None
        if spec is not None and spec.origin is not None:
            spec.loader = OnXpu(fullname, spec.origin)
        return spec


if os.environ.get("TRITON_INTERPRET") == "1":
    sys.meta_path.insert(0, Finder)
