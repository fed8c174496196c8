"""A small agent with a calculator, written for OpenAI's service. By itself it reads a question and prints the answer:

OPENAI_BASE_URL=... OPENAI_API_KEY=... python openai_agent_program.py <<< "What is 12 * 7?"
"""

import ast
import asyncio
import json
import operator
import sys
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

MAX_TURNS = 4
MAX_CHARACTERS = 100
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Work out an expression of numbers, + - * / and parentheses.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """Work out an expression, or say what is wrong with it."""
    try:
        return str(work_out(ast.parse(expression[:MAX_CHARACTERS], mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError) as exc:
        return f"error: {exc}"


def work_out(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](work_out(left), work_out(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -work_out(operand)
    raise ValueError("no arithmetic")


def answer_call(name: str, arguments: str) -> str:
    """Run a tool; whatever the model wrote, it gets an answer."""
    try:
        expression = json.loads(arguments)["expression"]
    except (ValueError, TypeError, KeyError):
        return "error: need an expression"
    return calculate(str(expression)) if name == "calculate" else f"error: there is no tool {name!r}"


async def answer(question: str, client: AsyncOpenAI) -> str:
    """Let the model answer a question, with the calculator if it likes; return its last words."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.to_dict())  # type: ignore[arg-type]
        for call in message.tool_calls:
            result = answer_call(call.function.name, call.function.arguments) if call.type == "function" else "error"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    sys.stdout.write(asyncio.run(answer(sys.stdin.read(), AsyncOpenAI())))
