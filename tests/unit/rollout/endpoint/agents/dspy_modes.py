"""Run programs of dspy with its adapters, and write what each predicts as a line of JSON."""

import json
import os
from typing import Any, Literal

import dspy


class Paint(dspy.Signature):  # type: ignore[misc]
    """Say which colour, and how many coats."""

    question: str = dspy.InputField()
    colour: Literal["red", "green"] = dspy.OutputField()
    coats: Literal[1, 2, 3] = dspy.OutputField()


def main() -> None:
    about: Any = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    model = dspy.LM("openai/gpt-4o", cache=False, num_retries=0, **about)
    for name, adapter in (
        ("JSONAdapter", dspy.JSONAdapter()),
        ("ChatAdapter, which falls back on JSONAdapter", dspy.ChatAdapter()),
    ):
        with dspy.context(lm=model, adapter=adapter):
            for kind in (dspy.Predict, dspy.ChainOfThought):
                found = kind(Paint)(question="Which?")
                print(json.dumps([f"{kind.__name__}, {name}", {"colour": found.colour, "coats": found.coats}]))


if __name__ == "__main__":
    main()
