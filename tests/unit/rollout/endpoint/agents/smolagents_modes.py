"""Have both agents of smolagents answer with tools, and write what each answers as a line of JSON."""

import json
import os
import sys
from contextlib import redirect_stdout
from typing import Any

from smolagents import CodeAgent, OpenAIServerModel, Tool, ToolCallingAgent


class Add(Tool):  # type: ignore[misc]
    name = "add"
    description = "Add two numbers."
    inputs = {
        "a": {"type": "integer", "description": "One."},
        "b": {"type": "integer", "description": "The other."},
    }
    output_type = "integer"

    def forward(self, a: int, b: int) -> int:
        return a + b


def main() -> None:
    model = OpenAIServerModel("gpt-4o", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    kinds: Any = (
        ("ToolCallingAgent", ToolCallingAgent, {}),
        ("ToolCallingAgent streamed", ToolCallingAgent, {"stream_outputs": True}),
        ("CodeAgent", CodeAgent, {}),
        ("CodeAgent use_structured_outputs_internally", CodeAgent, {"use_structured_outputs_internally": True}),
    )
    for name, kind, options in kinds:
        agent = kind(tools=[Add()], model=model, max_steps=2, verbosity_level=0, **options)
        with redirect_stdout(sys.stderr):  # where it shows what is streamed
            answer = agent.run("What is 2 and 3?")
        print(json.dumps([name, {"answer": str(answer)}]))


if __name__ == "__main__":
    main()
