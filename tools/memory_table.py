"""What fits where: the table in the trainer's README. ``--write`` puts it there.

    python -m tools.memory_table

Parts and their sum are preflight's own estimate; beside it stands what a whole traced step of the first rank has at
its peak (``trace_layouts``).
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

from areal_async.config.settings import TrainerSettings
from areal_async.doctor.preflight.memory import ModelSize
from areal_async.inference.card_share import MARGIN
from tools.decoder_shapes import QWEN2_5, DecoderShape, save_heads
from tools.trace_layouts import ALONE, settings_of, trace

README = Path(__file__).parents[1] / "areal_async" / "trainer" / "README.md"
BEGIN, END = "<!-- memory -->\n", "<!-- end of memory -->"
CARD_BYTES = 80e9
DTYPE = "bfloat16"


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


def traced_gigabytes(shape: DecoderShape) -> float:
    """Return the peak of the first of the fewest cards, in a step of two updates: the second has all moments."""
    num_cards = fewest_cards(shape.size)
    with tempfile.TemporaryDirectory() as folder:
        model = save_heads(shape, Path(folder))
        settings = settings_of(ALONE, model, num_cards, token_budget=trainer_of(num_cards).token_budget)
        return trace(settings, [0])[0].peak_bytes / 1e9


def table(traced: Mapping[str, float]) -> str:
    """Return the table, as Markdown.

    Args:
        traced: GB by name of the model.
    """
    heads = (
        "Qwen2.5", "cards", "weights, gradients, moments", "gathered", "gradients of a row", "activations", "logits",
        "a rank", "traced", "cards with adapters", "weights as served",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", f"|---|{'--:|' * (len(heads) - 1)}"]
    for name, shape in QWEN2_5.items():
        size, num_cards = shape.size, fewest_cards(shape.size)
        parts = size.trainer_parts(trainer_of(num_cards), dtype=DTYPE)
        each = " | ".join(f"{num_bytes / 1e9:.1f}" for num_bytes in parts.values())
        total = f"{sum(parts.values()) / 1e9:.0f} GB"
        adapters, served = fewest_cards(size, lora_rank=8), size.weights_bytes(dtype=DTYPE) / 1e9
        lines.append(
            f"| {name} | {num_cards} | {each} | {total} | {traced[name]:.0f} GB | {adapters} | {served:.0f} GB |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, or write it into the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into areal_async/trainer/README.md")
    given = parser.parse_args()
    made = table({name: traced_gigabytes(shape) for name, shape in QWEN2_5.items()})
    if not given.write:
        print(made, end="")
        return
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}{made}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
