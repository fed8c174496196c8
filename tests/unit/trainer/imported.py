"""What the ranks of a test need, imported once in the process that they are forked from; see ``processes.py``."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported

import torch._dynamo
import torch.distributed.pipelining  # noqa: F401
import transformers.models.auto.modeling_auto
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
