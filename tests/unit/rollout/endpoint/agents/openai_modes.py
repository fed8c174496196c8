"""Ask in the ways that OpenAI's own SDK has, and write what came of each as a line of JSON."""

import json
from typing import Any, Literal

import openai
from pydantic import BaseModel

QUESTION: Any = [{"role": "user", "content": "Which colour, and how many coats?"}]
ADD: Any = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, 3]}, "b": {"enum": [1, 2, 3]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Paint(BaseModel):
    """What to paint with."""

    colour: Literal["red", "green"]
    coats: Literal[1, 2, 3]


def tell(name: str, value: Any) -> None:
    print(json.dumps([name, value]))


def main() -> None:
    client = openai.OpenAI(max_retries=0)
    hosted: Any = {"type": "web_search"}
    try:
        client.responses.create(model="gpt-4o", input=QUESTION, tools=[hosted])
    except openai.BadRequestError as exc:
        tell("Responses hosted tools", {"refused": exc.body["message"] if isinstance(exc.body, dict) else ""})
    chat = client.chat.completions.create(model="gpt-4o", messages=QUESTION)
    tell("Chat Completions", chat.choices[0].message.content)
    chunks = client.chat.completions.create(model="gpt-4o", messages=QUESTION, stream=True)
    tell("Chat Completions streamed", "".join(one.choices[0].delta.content or "" for one in chunks))
    parsed = client.chat.completions.parse(model="gpt-4o", messages=QUESTION, response_format=Paint)
    tell("Chat Completions parse", json.loads(parsed.choices[0].message.content or ""))
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": ADD}}
    called = client.chat.completions.create(model="gpt-4o", messages=QUESTION, tools=[tool], tool_choice="required")
    calls: Any = called.choices[0].message.tool_calls
    tell("Chat Completions tool_choice required", json.loads(calls[0].function.arguments))
    tell("Responses", client.responses.create(model="gpt-4o", input=QUESTION).output_text)
    tell(
        "Responses parse",
        json.loads(client.responses.parse(model="gpt-4o", input=QUESTION, text_format=Paint).output_text),
    )
    tell("Completions", client.completions.create(model="gpt-4o", prompt="Which colour?").choices[0].text)


if __name__ == "__main__":
    main()
