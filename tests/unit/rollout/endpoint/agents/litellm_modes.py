"""Ask in the ways that litellm has, by either API, and write what came of each as a line of JSON."""

import json
import os
from typing import Any, Literal

import litellm
from pydantic import BaseModel

QUESTION: Any = [{"role": "user", "content": "Which colour, and how many coats?"}]


class Paint(BaseModel):
    """What to paint with."""

    colour: Literal["red", "green"]
    coats: Literal[1, 2, 3]


PAINT: Any = {"type": "function", "function": {"name": "paint", "parameters": Paint.model_json_schema()}}


def tell(name: str, value: Any) -> None:
    print(json.dumps([name, value]))


def main() -> None:
    base_url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    ways: Any = (
        ("openai/gpt-4o", {"api_base": base_url}),
        ("anthropic/claude-sonnet-4-5", {"api_base": base_url.removesuffix("/v1"), "max_tokens": 200}),
    )
    for model, options in ways:
        about: Any = {"model": model, "messages": QUESTION, "api_key": key, "num_retries": 0, **options}
        name = model.partition("/")[0]
        tell(f"{name} completion", litellm.completion(**about).choices[0].message.content)
        pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **about)]
        tell(f"{name} completion streamed", "".join(pieces))
        forced = litellm.completion(tools=[PAINT], tool_choice="required", **about)
        tell(f"{name} tool_choice required", json.loads(forced.choices[0].message.tool_calls[0].function.arguments))
        formed = litellm.completion(response_format=Paint, **about)
        tell(f"{name} response_format", json.loads(formed.choices[0].message.content))


if __name__ == "__main__":
    main()
