"""Ask for the same answer in all the ways that pydantic-ai has, and write what came of each as a line of JSON."""

import json
import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Paint(BaseModel):
    """What to paint with."""

    colour: Literal["red", "green"]
    coats: Literal[1, 2, 3]


class Anything(BaseModel):
    """Prompts beg for a form, and JSON mode has any object."""

    colour: str = "any"


def main() -> None:
    provider = OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    for api in (OpenAIChatModel, OpenAIResponsesModel):
        model = api("gpt-4o", provider=provider)
        for output in (ToolOutput(Paint), NativeOutput(Paint), PromptedOutput(Anything)):
            agent = Agent(model, output_type=output, retries=0)
            result = agent.run_sync("Which colour, and how many coats?")
            print(json.dumps([f"{api.__name__} {type(output).__name__}", result.output.model_dump()]))


if __name__ == "__main__":
    main()
