"""Ask for the same answer in the modes that instructor has for OpenAI, and write each as a line of JSON.

That of parallel calls is not among them: it leaves the choice to call to the model.
"""

import json
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel

QUESTION: Any = [{"role": "user", "content": "Which colour, and how many coats?"}]


class Paint(BaseModel):
    """What to paint with."""

    colour: Literal["red", "green"]
    coats: Literal[1, 2, 3]


class Anything(BaseModel):
    """JSON mode has any object."""

    colour: str = "any"


def main() -> None:
    for mode, kind in (
        (instructor.Mode.TOOLS, Paint),
        (instructor.Mode.TOOLS_STRICT, Paint),
        (instructor.Mode.JSON_SCHEMA, Paint),
        (instructor.Mode.JSON, Anything),
        (instructor.Mode.RESPONSES_TOOLS, Paint),
    ):
        client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode)
        found: Any = client.chat.completions.create(
            model="gpt-4o", messages=QUESTION, response_model=kind, max_retries=0
        )
        print(json.dumps([mode.name, found.model_dump()]))


if __name__ == "__main__":
    main()
