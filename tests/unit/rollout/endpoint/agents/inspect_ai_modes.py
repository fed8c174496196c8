"""Evaluate tasks of inspect_ai, and write what the model answered in each as a line of JSON."""

import json
import os
import tempfile
from typing import Any, Literal

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import json_schema
from pydantic import BaseModel


class Paint(BaseModel):
    """What to paint with."""

    colour: Literal["red", "green"]
    coats: Literal[1, 2, 3]


@tool
def add() -> Any:
    async def execute(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        return str(a + b)

    return execute


def main() -> None:
    about: Any = {"model_base_url": os.environ["OPENAI_BASE_URL"], "display": "none", "log_level": "error"}
    samples = [Sample(input="Which colour, and how many coats?", target="red")]
    form = GenerateConfig(response_schema=ResponseSchema(name="paint", json_schema=json_schema(Paint)))
    tasks = (
        ("generate", Task(dataset=samples, solver=generate(), scorer=includes())),
        ("use_tools", Task(dataset=samples, solver=[use_tools(add()), generate()], scorer=includes())),
        ("response_schema", Task(dataset=samples, solver=generate(), scorer=includes(), config=form)),
    )
    with tempfile.TemporaryDirectory() as logs:
        for model in ("openai/gpt-4o", "anthropic/claude-sonnet-4-5"):
            for name, task in tasks:
                (log,) = eval(task, model=model, log_dir=logs, max_retries=0, **about)
                assert log.status == "success", log.error
                (sample,) = log.samples or []
                print(json.dumps([f"{model.partition('/')[0]} {name}", sample.output.completion]))


if __name__ == "__main__":
    main()
