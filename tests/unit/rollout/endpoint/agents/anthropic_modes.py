"""Ask in the ways that Anthropic's own SDK has, and write what came of each as a line of JSON."""

import json
import os
from typing import Any, Literal

import anthropic
from pydantic import BaseModel

QUESTION: Any = [{"role": "user", "content": "Which colour, and how many coats?"}]
ABOUT: Any = {"model": "claude", "max_tokens": 200, "messages": QUESTION}
PAINT: Any = {
    "name": "paint",
    "input_schema": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "coats": {"enum": [1, 2, 3]}},
        "required": ["colour", "coats"],
        "additionalProperties": False,
    },
}


class Paint(BaseModel):
    """What to paint with."""

    colour: Literal["red", "green"]
    coats: Literal[1, 2, 3]


def tell(name: str, value: Any) -> None:
    print(json.dumps([name, value]))


def main() -> None:
    base_url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    client = anthropic.Anthropic(base_url=base_url, api_key=os.environ["OPENAI_API_KEY"], max_retries=0)
    said: Any = client.messages.create(**ABOUT).content
    tell("Messages", "".join(block.text for block in said))
    with client.messages.stream(**ABOUT) as stream:
        tell("Messages streamed", "".join(stream.text_stream))
    for choice in ({"type": "any"}, {"type": "tool", "name": "paint"}):
        answer: Any = client.messages.create(**ABOUT, tools=[PAINT], tool_choice=choice)
        tell(f"Messages tool_choice {choice['type']}", answer.content[0].input)
    parsed: Any = client.messages.parse(**ABOUT, output_format=Paint)
    tell("Messages parse", parsed.parsed_output.model_dump())
    counted = client.messages.count_tokens(model="claude", messages=QUESTION)
    tell("count_tokens", counted.input_tokens)


if __name__ == "__main__":
    main()
