"""What fits where: the table in the trainer's README, from preflight's own estimate. ``--write`` puts it there.

python -m tools.memory_table
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from areal_async.config.settings import TrainerSettings
from areal_async.doctor.preflight.memory import MARGIN, ModelSize

README = Path(__file__).parents[1] / "areal_async" / "trainer" / "README.md"
BEGIN, END = "<!-- memory -->\n", "<!-- end of memory -->"
CARD_BYTES = 80e9
DTYPE = "bfloat16"


class DecoderShape(NamedTuple):
    """Sizes of a published decoder, as its ``config.json`` has them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    is_tied: bool

    @property
    def size(self) -> ModelSize:
        """The same as preflight reads it, its parameters counted: with biases of queries, keys and values."""
        kv_width = self.hidden // self.heads * self.kv_heads
        attention = 2 * self.hidden * (self.hidden + kv_width) + self.hidden + 2 * kv_width
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        words = self.vocab * self.hidden * (1 if self.is_tied else 2)
        return ModelSize(
            num_parameters=self.layers * layer + words + self.hidden,
            num_layers=self.layers,
            hidden=self.hidden,
            kv_width=kv_width,
            intermediate=self.intermediate,
            is_tied=self.is_tied,
            vocab=self.vocab,
            context=32768,
        )


QWEN2_5 = {
    "0.5B": DecoderShape(24, 896, 14, 2, 4864, 151_936, is_tied=True),
    "1.5B": DecoderShape(28, 1536, 12, 2, 8960, 151_936, is_tied=True),
    "7B": DecoderShape(28, 3584, 28, 4, 18_944, 152_064, is_tied=False),
    "14B": DecoderShape(48, 5120, 40, 8, 13_824, 152_064, is_tied=False),
    "32B": DecoderShape(64, 5120, 40, 8, 27_648, 152_064, is_tied=False),
    "72B": DecoderShape(80, 8192, 64, 8, 29_568, 152_064, is_tied=False),
}


def trainer_of(num_ranks: int, *, lora_rank: int = 0) -> TrainerSettings:
    """Return the settings that the table is for: sharded over all ranks, activations computed again."""
    given = {"num_ranks": num_ranks, "activation_checkpointing": True}
    return TrainerSettings.model_validate(given | ({"lora": {"rank": lora_rank}} if lora_rank else {}))


def fewest_cards(size: ModelSize, *, lora_rank: int = 0) -> int:
    """Return the least power of two at which a rank's estimate is within the margin of a card."""
    num_cards = 1
    while size.trainer_bytes(trainer_of(num_cards, lora_rank=lora_rank), dtype=DTYPE) > MARGIN * CARD_BYTES:
        num_cards *= 2
    return num_cards


def table() -> str:
    """Return the table, as Markdown."""
    heads = (
        "Qwen2.5", "cards", "weights, gradients, moments", "gathered", "gradients of a row", "activations", "logits",
        "a rank", "cards with adapters", "weights as served",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", f"|---|{'--:|' * (len(heads) - 1)}"]
    for name, shape in QWEN2_5.items():
        size, num_cards = shape.size, fewest_cards(shape.size)
        parts = size.trainer_parts(trainer_of(num_cards), dtype=DTYPE)
        each = " | ".join(f"{num_bytes / 1e9:.1f}" for num_bytes in parts.values())
        total = f"{sum(parts.values()) / 1e9:.0f} GB"
        adapters, served = fewest_cards(size, lora_rank=8), size.weights_bytes(dtype=DTYPE) / 1e9
        lines.append(f"| {name} | {num_cards} | {each} | {total} | {adapters} | {served:.0f} GB |")
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
