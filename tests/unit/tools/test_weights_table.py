"""The table of what a version takes is what the model says of the ratios that stand beside it."""

from tools.decoder_shapes import QWEN2_5
from tools.weights_table import BEGIN, END, RATIOS, README, table, times


def test_the_table_in_the_readme_is_what_the_model_says() -> None:
    text = README.read_text(encoding="utf-8")
    _, _, rest = text.partition(BEGIN)
    there, _, _ = rest.partition(END)

    assert there == table(), "python -m tools.weights_table --write"
    assert ", ".join(f"{name} {ratio:.1f}" for name, ratio in RATIOS.items()) in text


def test_ranks_write_side_by_side_and_every_rank_sees_every_tensor() -> None:
    size = QWEN2_5["72B"].size
    one_host, four_hosts = times(size, 8), times(size, 32)

    assert four_hosts.write < 0.3 * one_host.write
    assert four_hosts.gather > one_host.gather
    assert (four_hosts.verify, four_hosts.send) == (one_host.verify, one_host.send)
