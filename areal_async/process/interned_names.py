"""The interpreter's table of interned strings, brought to its final size before the first step.

``pathlib`` interns every name it parses, and a trainer writes to new names at every step. The table drops a name with
its last path, yet its slots are used up and the table is copied into a larger one, by 11 MB, a few thousand steps
into a run, where it looks like a leak. It grows so once: 0.2 s of a processor, measured with transformers imported.
"""

import sys

NUM_NAMES = 800_000
"""More than the table has slots left, twice over, with what torch and transformers intern."""


def settle_table() -> None:
    """Intern names and drop each, until the table has the size at which dropped names make room for new ones."""
    for number in range(NUM_NAMES):
        sys.intern(f"{number} of {NUM_NAMES}")
