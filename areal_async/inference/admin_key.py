"""The secret of a server: who has none does not administrate it. Without torch.

It comes by the environment, which other users of the host cannot read, as they can a command line; no route tells it.
"""

import os

VARIABLE = "AREAL_ADMIN_API_KEY"
"""Environment variable with the key, for the server that is started."""


def take_admin_key() -> str:
    """Return the secret that this process was started with, and keep it from its children; empty for none."""
    return os.environ.pop(VARIABLE, "")
