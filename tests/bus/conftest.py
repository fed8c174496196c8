"""The tests of this package run on uvloop alone, but for those of the bus itself and one of each process's main road.

These have ``anyio_backend = on_both_loops`` in their module, or ``BOTH`` by themselves.
"""

from tests.loops import on_uvloop

anyio_backend = on_uvloop
