"""Have smolagents' ToolCallingAgent answer with tools, and write what it answers as a line of JSON."""

import json
import os
import sys
from contextlib import redirect_stdout

from smolagents import OpenAIServerModel, Tool, ToolCallingAgent


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
    for is_streamed in (False, True):
        agent = ToolCallingAgent(tools=[Add()], model=model, max_steps=3, stream_outputs=is_streamed, verbosity_level=0)
        with redirect_stdout(sys.stderr):  # where it shows what is streamed
            answer = agent.run("What is 2 and 3?")
        print(json.dumps([f"ToolCallingAgent{' streamed' * is_streamed}", {"answer": answer}]))


main()
