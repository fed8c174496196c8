"""One contender of ``tools/bench_trainer.py``: the training phase of TRL's ``GRPOTrainer`` on the benchmark's batch.

It runs in a Python environment that has TRL (1.16 is what was tried), and imports nothing of this repository but
``tools.rounds``. The batch's completions come in by ``rollout_func`` and its rewards by a reward function; what
``_prepare_inputs`` takes (generation's stand-in, padding, advantages) is no part of the training phase and not counted.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.rounds import Clock, Stage

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout_func is experimental there


def main() -> None:
    """Play rounds until there is nobody to play for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=Path, required=True)
    parser.add_argument("--token-budget", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    stage = Stage()
    torch.set_num_threads(arguments.threads)
    trainer_of(arguments, stage).train()


def trainer_of(arguments: argparse.Namespace, stage: Stage) -> Any:
    """Return a trainer that waits for the stage before each step, and ends the process when the stage is over."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, unused-ignore]

    with np.load(arguments.batch) as arrays:
        batch = dict(arrays)
    prompts, answers, group_size = batch["prompt_lengths"], batch["answer_lengths"], int(batch["group_size"])
    num_sequences = len(prompts)
    sequences = np.split(batch["token_ids"], np.cumsum(prompts + answers)[:-1])
    per_device = rows_at_once(num_sequences, int(prompts.max() + answers.max()), arguments.token_budget)
    config = GRPOConfig(
        output_dir=str(arguments.batch.parent / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        learning_rate=1e-8,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=1e9,
        beta=0.0,
        loss_type="dapo",  # a mean over all tokens of the batch, as ours
        num_generations=group_size,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=num_sequences // per_device,
        max_completion_length=int(answers.max()),
        shuffle_dataset=False,
        max_steps=1_000_000,
        logging_steps=1_000_000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )

    def rollout(names: list[str], _trainer: Any) -> dict[str, Any]:
        places = _places(names, group_size)
        return {
            "prompt_ids": [sequences[place][: prompts[place]].tolist() for place in places],
            "completion_ids": [sequences[place][prompts[place] :].tolist() for place in places],
            "logprobs": [[0.0] * int(answers[place]) for place in places],
        }

    def reward(prompts: list[str], **_columns: Any) -> list[float]:
        return [float(batch["rewards"][place]) for place in _places(prompts, group_size)]

    class Timed(GRPOTrainer):  # type: ignore[misc, unused-ignore]
        preparing = Clock().read()

        def _prepare_inputs(self, given: Any) -> Any:
            clock = Clock()
            inputs = super()._prepare_inputs(given)
            self.preparing = {name: self.preparing[name] + took for name, took in clock.read().items()}
            return inputs

    class Rounds(TrainerCallback):  # type: ignore[misc, unused-ignore]
        clock = Clock()
        grad_norm = 0.0

        def on_step_begin(self, *_given: Any, **_more: Any) -> None:
            if not stage.wait():
                raise SystemExit
            trainer.preparing = dict.fromkeys(trainer.preparing, 0.0)
            self.clock = Clock()

        def on_pre_optimizer_step(self, *_given: Any, **more: Any) -> None:
            if not self.grad_norm:  # once: in the first round, which is not measured
                gradients = [p.grad for p in more["model"].parameters() if p.grad is not None]
                self.grad_norm = float(torch.nn.utils.get_total_norm(gradients))

        def on_step_end(self, *_given: Any, **_more: Any) -> None:
            took = {name: took - trainer.preparing[name] for name, took in self.clock.read().items()}
            stage.report({**took, "num_tokens": int(answers.sum()), "grad_norm": self.grad_norm})

    trainer = Timed(
        model=arguments.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [str(group) for group in range(num_sequences // group_size)]}),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        rollout_func=rollout,
        callbacks=[Rounds()],
    )
    return trainer


def rows_at_once(num_sequences: int, longest: int, token_budget: int) -> int:
    """Return the largest micro-batch that divides the batch and whose padded tokens fit the budget."""
    fitting = [size for size in range(1, num_sequences + 1) if num_sequences % size == 0]
    return max((size for size in fitting if size * longest <= token_budget), default=1)


def _places(names: list[str], group_size: int) -> list[int]:
    """Return which sequence each of the repeated prompts stands for."""
    seen: dict[str, int] = {}
    places = []
    for name in names:
        sibling = seen.get(name, 0)
        seen[name] = sibling + 1
        places.append(int(name) * group_size + sibling)
    return places


if __name__ == "__main__":
    main()
