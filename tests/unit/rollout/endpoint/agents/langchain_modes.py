"""Ask for the same answer in all the ways that langchain-openai has, and write what came of each as a line of JSON."""

import json
from typing import Any, Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "Which colour, and how many coats?"


class Paint(BaseModel):
    """What to paint with."""

    colour: Literal["red", "green"]
    coats: Literal[1, 2, 3]


@tool
def add(a: Literal[1, 2, 3], b: Literal[1, 2, 3]) -> int:
    """Add two numbers."""
    return a + b


def tell(name: str, value: Any) -> None:
    print(json.dumps([name, value]))


def main() -> None:
    for is_responses in (False, True):
        model = ChatOpenAI(model="gpt-4o", use_responses_api=is_responses, max_retries=0)
        api = "Responses" if is_responses else "Chat"
        for method in ("json_schema", "function_calling"):
            found: Any = model.with_structured_output(Paint, method=method).invoke(QUESTION)
            tell(f"{api} {method}", found.model_dump())
        strict: Any = model.with_structured_output(Paint, method="function_calling", strict=True).invoke(QUESTION)
        tell(f"{api} function_calling strict", strict.model_dump())
        tell(f"{api} json_mode", model.with_structured_output(None, method="json_mode").invoke(f"{QUESTION} JSON."))
        for choice in ("any", "required", "add"):
            (call,) = model.bind_tools([add], tool_choice=choice).invoke(QUESTION).tool_calls
            tell(f"{api} tool_choice {choice}", call["args"])
        (call,) = model.bind_tools([add], tool_choice="any", parallel_tool_calls=False).invoke(QUESTION).tool_calls
        tell(f"{api} tool_choice any, one call", call["args"])
        chunks = list(model.with_structured_output(Paint, method="json_schema").stream(QUESTION))
        tell(f"{api} streamed", chunks[-1].model_dump())


if __name__ == "__main__":
    main()
