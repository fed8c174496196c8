"""Run graphs of langgraph whose answers are structured, and write what each comes to as a line of JSON."""

import json
import warnings
from typing import Any, Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent
from pydantic import BaseModel

QUESTION: Any = {"messages": [("user", "Which colour, and how many coats?")]}


class Paint(BaseModel):
    """What to paint with."""

    colour: Literal["red", "green"]
    coats: Literal[1, 2, 3]


class Painted(MessagesState):
    paint: Any


@tool
def add(a: Literal[1, 2, 3], b: Literal[1, 2, 3]) -> int:
    """Add two numbers."""
    return a + b


def tell(name: str, value: Any) -> None:
    print(json.dumps([name, value]))


def main() -> None:
    model = ChatOpenAI(model="gpt-4o", max_retries=0)
    with warnings.catch_warnings(action="ignore"):
        ready: Any = create_react_agent(model, [add], response_format=Paint)
    tell("create_react_agent response_format", ready.invoke(QUESTION)["structured_response"].model_dump())
    caller = model.bind_tools([add], tool_choice="any")
    for method in ("json_schema", "function_calling"):
        painter = model.with_structured_output(Paint, method=method)
        graph: Any = StateGraph(Painted)
        graph.add_node("call", lambda state: {"messages": [caller.invoke(state["messages"])]})
        graph.add_node("tools", ToolNode([add]))
        graph.add_node("paint", lambda state, own=painter: {"paint": own.invoke(state["messages"])})
        for edge in ((START, "call"), ("call", "tools"), ("tools", "paint"), ("paint", END)):
            graph.add_edge(*edge)
        tell(f"StateGraph, a forced call and {method}", graph.compile().invoke(QUESTION)["paint"].model_dump())


if __name__ == "__main__":
    main()
