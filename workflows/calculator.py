"""Sums too long for the head: the model may call a calculator, and learns to."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

from areal_async import Policy, Prompt, ToolError
from rewards.math_answer import final_number_matches

MAX_CHARACTERS = 100
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


async def calculator(prompt: Prompt, policy: Policy) -> float:
    """Answer one question with the calculator at hand; 1.0 when the final number is right."""
    done = await policy.act([{"role": "user", "content": prompt["question"]}], [calculate], max_turns=4)
    return await final_number_matches(done.text, prompt["answer"]) if done.is_finished else 0.0


async def mental(prompt: Prompt, policy: Policy) -> float:
    """Answer the same question without one, for comparison."""
    reply = await policy.chat([{"role": "user", "content": prompt["question"]}])
    return 0.0 if "<tool_call>" in reply.text else await final_number_matches(reply.text, prompt["answer"])


async def calculate(expression: str) -> str:
    """Work out an expression.

    Args:
        expression: numbers, + - * / and parentheses, such as 12*(3+4).
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"got {len(expression)} characters, need at most {MAX_CHARACTERS}")
    try:
        value = _work_out(ast.parse(expression.strip(), mode="eval").body)
        return str(value.numerator if value.denominator == 1 else float(value))
    except ZeroDivisionError as exc:
        raise ToolError("nothing can be divided by 0") from exc
    except (SyntaxError, ValueError, OverflowError) as exc:
        raise ToolError(f"cannot work out {expression!r}, need numbers, + - * / and parentheses") from exc


def _work_out(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value):
            return Fraction(str(value))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_work_out(left), _work_out(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_work_out(operand))
    raise ValueError("no arithmetic")
