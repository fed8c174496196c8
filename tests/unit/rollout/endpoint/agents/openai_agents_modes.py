"""Run agents of OpenAI's Agents SDK over both APIs, and write what each answers as a line of JSON."""

import asyncio
import json
from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    WebSearchTool,
    function_tool,
)
from pydantic import BaseModel

QUESTION = "Which colour, and how many coats?"


class Paint(BaseModel):
    """What to paint with."""

    colour: Literal["red", "green"]
    coats: Literal[1, 2, 3]


@function_tool
def add(a: Literal[1, 2, 3], b: Literal[1, 2, 3]) -> int:
    """Add two numbers."""
    return a + b


def tell(name: str, value: Any) -> None:
    print(json.dumps([name, value]))


async def run() -> None:
    client = openai.AsyncOpenAI(max_retries=0)
    quiet = RunConfig(tracing_disabled=True)
    searcher = Agent(name="searcher", model=OpenAIResponsesModel("gpt-4o", client), tools=[WebSearchTool()])
    try:
        await Runner.run(searcher, QUESTION, run_config=quiet)
    except openai.BadRequestError as exc:
        tell("hosted tools", {"refused": exc.body["message"] if isinstance(exc.body, dict) else ""})
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        name, model = kind.__name__, kind("gpt-4o", client)
        plain = Agent(name="plain", instructions="Answer.", model=model)
        tell(f"{name} text", (await Runner.run(plain, QUESTION, run_config=quiet)).final_output)
        streamed = Runner.run_streamed(plain, QUESTION, run_config=quiet)
        async for _event in streamed.stream_events():
            pass
        tell(f"{name} streamed", streamed.final_output)
        forced = ModelSettings(tool_choice="required")
        caller = Agent(name="caller", instructions="Add.", model=model, tools=[add], model_settings=forced)
        done = await Runner.run(caller, "2 and 3?", run_config=quiet, max_turns=4)
        tell(f"{name} function tools, the first call required", [item.type for item in done.new_items])
        painter = Agent(name="painter", instructions="Paint.", model=model, output_type=Paint)
        painted: Any = await Runner.run(painter, QUESTION, run_config=quiet)
        tell(f"{name} output_type", painted.final_output.model_dump())


def main() -> None:
    asyncio.run(run())


if __name__ == "__main__":
    main()
