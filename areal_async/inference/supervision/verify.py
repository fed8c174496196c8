"""Prove which weights a server runs, from the checksums it gives of its own tensors.

Tensors are compared with the hashes that the trainer announced: SGLang on a CPU shows the first 16 hex digits of the
SHA-256 of a tensor's bytes, the embedded engine all 64. Only names known to both sides count (a server may fuse
tensors), however those of a model that sees are written, and over several ranks only norms, the ones that no rank
splits. On a GPU the real SGLang hashes by a function of its own; there the first server of the node that holds a
version, believed for naming it, vouches for what the others must show.
"""

from areal_async.inference.faults import ServerFault
from areal_async.inference.http import Checksums, ServerApi
from areal_async.inference.supervision.swap import check_version
from areal_async.protocol.types import WeightsVersion
from areal_async.vision.names import plain_name

CHECKSUM_DEADLINE_S = 120.0
"""All of a model's bytes are hashed, beside what its host does else."""
WHOLE_ON_EVERY_RANK = "norm"
"""Part of the names of the tensors that tensor parallelism leaves whole."""


class Verifier:
    """Checks the servers of one node."""

    def __init__(self, *, has_sha256: bool) -> None:
        """Say with ``has_sha256`` whether the servers' checksums are SHA-256, as the trainer's are."""
        self._has_sha256 = has_sha256
        self._vouched: dict[str, str] = {}

    async def check(self, api: ServerApi, target: WeightsVersion) -> None:
        """Return only if the server runs ``target``.

        Raises:
            ServerFault: it names another version, or its tensors are not those of ``target``.
        """
        await check_version(api, target)
        if not target.tensors_sha256:
            return
        checksums = await api.checksums(deadline_s=CHECKSUM_DEADLINE_S)
        if self._has_sha256:
            compare(checksums, target)
            return
        vouched = self._vouched.get(target.version)
        if vouched is None:
            self._vouched = {target.version: checksums.whole}
        elif vouched != checksums.whole:
            raise ServerFault(f"got checksum {checksums.whole}, need {vouched} as another server has")


def compare(checksums: Checksums, target: WeightsVersion) -> None:
    """Hold a server's checksums against the announced hashes.

    Raises:
        ServerFault: a tensor differs, or none is known to both.
    """
    num_compared = 0
    announced = {plain_name(name): expected for name, expected in target.tensors_sha256.items()}
    for shown in checksums.ranks:
        found = {plain_name(name): checksum for name, checksum in shown.items()}
        for name, expected in announced.items():
            if name not in found or (len(checksums.ranks) > 1 and WHOLE_ON_EVERY_RANK not in name):
                continue
            if not found[name] or not expected.startswith(found[name]):
                raise ServerFault(f"tensor {name} has checksum {found[name]!r}, need {expected}")
            num_compared += 1
    if not num_compared:
        raise ServerFault(f"got checksums of none of the announced tensors {sorted(target.tensors_sha256)}")
