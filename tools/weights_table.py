"""What a weights version takes: the table in the trainer's README. ``--write`` puts it there.

    python -m tools.weights_table

A model, of the ratios that ``tools.bench_weights`` measures on a CPU and of rates that are assumed. With
``B`` the bytes of a version, ``b`` those of the rank that writes most and ``h`` hosts of 8 ranks:

    gather     the longer of B / link (every rank sees every tensor) and ratio * b / PCIe, which go side by side
    write      ratio * (B / h / disk, ranks write side by side; then b / sha256, its files side by side)
    verify     ratio * B / sha256, one file after the other
    stage      B / disk, then ratio * B / PCIe
    send       B / network

A step waits for ``gather``, by ``distributed`` for ``gather`` and then ``send``; all else goes on beside the next step.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from areal_async.doctor.preflight.memory import FILE_BYTES, ModelSize
from areal_async.trainer.engine.digests import MAX_THREADS
from tools.decoder_shapes import QWEN2_5
from tools.memory_table import DTYPE, fewest_cards, trainer_of

README = Path(__file__).parents[1] / "areal_async" / "trainer" / "README.md"
BEGIN, END = "<!-- weights -->\n", "<!-- end of weights -->"
RATIOS = {"gather": 6.7, "write": 1.7, "verify": 1.3, "stage": 4.1}
"""Of time beside the plain way to do the same, as ``tools.bench_weights`` printed them."""
RANKS_PER_HOST = 8
PCIE, DISK, SHA256, NVLINK, NETWORK = 25e9, 3e9, 1.5e9, 150e9, 25e9
"""Bytes per second, assumed: a copy between a GPU and pinned memory; a host's NVMe, either way; a core that hashes;
what reaches a GPU from its host's others, and over a network of 200 Gbit/s."""


class Times(NamedTuple):
    """Seconds of the parts of one version."""

    gather: float
    write: float
    verify: float
    stage: float
    send: float


def times(size: ModelSize, num_ranks: int) -> Times:
    """Return what the parts take by this model."""
    whole = size.weights_bytes(dtype=DTYPE)
    own = size.version_bytes(trainer_of(num_ranks), dtype=DTYPE)
    num_hosts = -(-num_ranks // RANKS_PER_HOST)
    num_hashed = min(MAX_THREADS, -(-own // FILE_BYTES))
    link = NVLINK if num_hosts == 1 else NETWORK
    gathering = whole / link if num_ranks > 1 else 0.0
    return Times(
        gather=max(gathering, RATIOS["gather"] * own / PCIE),
        write=RATIOS["write"] * (whole / num_hosts / DISK + own / num_hashed / SHA256),
        verify=RATIOS["verify"] * whole / SHA256,
        stage=whole / DISK + RATIOS["stage"] * whole / PCIE,
        send=whole / NETWORK,
    )


def table() -> str:
    """Return the table, as Markdown; seconds."""
    heads = (
        "Qwen2.5", "ranks", "GB", "of a rank", *Times._fields, "`disk`: a step waits", "until it is served",
        "`distributed`: a step waits", "until its copy is on disk",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", f"|---|{'--:|' * (len(heads) - 1)}"]
    for name, shape in QWEN2_5.items():
        size, num_ranks = shape.size, fewest_cards(shape.size)
        own = size.version_bytes(trainer_of(num_ranks), dtype=DTYPE)
        one = times(size, num_ranks)
        sums = (
            one.gather,
            one.gather + one.write + one.verify + one.stage,
            one.gather + one.send,
            one.gather + one.send + one.write,
        )
        sizes = (size.weights_bytes(dtype=DTYPE) / 1e9, own / 1e9)
        cells = (name, str(num_ranks), *(f"{value:.1f}" for value in (*sizes, *one, *sums)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, or write it into the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into areal_async/trainer/README.md")
    if not parser.parse_args().write:
        print(table(), end="")
        return
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}{table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
