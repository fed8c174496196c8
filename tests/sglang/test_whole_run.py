"""A whole run whose policy sees, served by the real SGLang: the trainer says of each token what the server said."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_run import Run, assert_accounts, events
from tests.sglang.conftest import find_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

NUM_STEPS = 4
DATA = Path("configs/data/clevr_count_train.parquet")
MODEL = Path("configs/models/tiny_vision")


@pytest.mark.parametrize("transfer", ["disk", pytest.param("distributed", marks=pytest.mark.nightly)])
def test_each_version_of_the_tower_sees_for_the_server_what_it_sees_for_the_trainer(
    tmp_path: Path, transfer: str
) -> None:
    """On-policy, so that every token counts for the gap; and every step shows the same four images."""
    pq.write_table(pq.read_table(DATA).slice(0, 4), rows := tmp_path / "rows.parquet")
    run = Run(
        tmp_path, "seen", run__steps=NUM_STEPS, rollout__max_staleness=0, trainer__warmup_steps=1,
        inference__backend="sglang", inference__python=find_sglang(), inference__weight_transfer=transfer,
    )  # fmt: skip

    ended = run.finish(
        *("--config", "configs/clevr_count_cpu.yaml", "--tasks.0.dataset.path", str(rows)),
        workflow="workflows/clevr_count.py",
    )

    assert ended.returncode == 0, ended.stdout
    assert_accounts(run, num_steps=NUM_STEPS, max_staleness=0)
    assert all(line["failed"] == 0 for line in run.lines), run.lines
    assert all(line["num_current_tokens"] == line["num_tokens"] > 0 for line in run.lines), run.lines
    assert all(line["logprob_gap_mean"] <= 1e-4 for line in run.lines), run.lines
    assert {row["newest"] for row in run.trained} == {f"1-{version}" for version in range(NUM_STEPS)}
    assert all(len(row["images"][0]) == 1 for row in run.trained)
    swaps = [swap["kind"] for swap in events(run, "node-0", "server.swapped")]
    assert swaps.count(transfer) >= NUM_STEPS - 1, swaps
    before, after = (load_file(folder / "model.safetensors") for folder in (MODEL, run.directory / "model"))
    towers = [name for name in before if ".visual." in name]
    assert towers
    assert not [name for name in towers if torch.equal(before[name], after[name])]
