"""What the ranks of a test need, imported once in the process that they are forked from; see ``rank_workers.py``."""

import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported

for name in (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "areal_async.trainer.engine.staged_planner",
    "areal_async.trainer.output.broadcast",
    "tests.unit.trainer.engine.test_pairs",
    "tests.unit.trainer.trained_steps",
    "tools.compare_layouts",
):
    importlib.import_module(name)
