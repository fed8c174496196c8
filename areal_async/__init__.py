"""Asynchronous reinforcement learning for language models: generation never waits for training.

Importing this package is cheap; the names that workflows and rewards use are loaded on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_async.contracts import (
        Act,
        DescribedTool,
        Message,
        Policy,
        Reply,
        RewardModel,
        Rewards,
        ToolCall,
        ToolResult,
        Workflow,
        group_workflow,
        per_node,
    )
    from areal_async.errors import ContextFull, Reject, ToolError
    from areal_async.rollout.confine import shared
    from areal_async.rollout.rewards import reward
    from areal_async.rollout.tools.mcp import mcp_tools, shared_mcp_tools
    from areal_async.rollout.tools.schema import tool
    from areal_async.types import Prompt

__version__ = "0.1.0"

_HOMES = {
    "Act": "areal_async.contracts",
    "ContextFull": "areal_async.errors",
    "DescribedTool": "areal_async.contracts",
    "Message": "areal_async.contracts",
    "Policy": "areal_async.contracts",
    "Prompt": "areal_async.types",
    "Reject": "areal_async.errors",
    "Reply": "areal_async.contracts",
    "RewardModel": "areal_async.contracts",
    "Rewards": "areal_async.contracts",
    "ToolCall": "areal_async.contracts",
    "ToolError": "areal_async.errors",
    "ToolResult": "areal_async.contracts",
    "Workflow": "areal_async.contracts",
    "group_workflow": "areal_async.contracts",
    "mcp_tools": "areal_async.rollout.tools.mcp",
    "per_node": "areal_async.contracts",
    "reward": "areal_async.rollout.rewards",
    "shared": "areal_async.rollout.confine",
    "shared_mcp_tools": "areal_async.rollout.tools.mcp",
    "tool": "areal_async.rollout.tools.schema",
}

__all__ = [
    "Act",
    "ContextFull",
    "DescribedTool",
    "Message",
    "Policy",
    "Prompt",
    "Reject",
    "Reply",
    "RewardModel",
    "Rewards",
    "ToolCall",
    "ToolError",
    "ToolResult",
    "Workflow",
    "group_workflow",
    "mcp_tools",
    "per_node",
    "reward",
    "shared",
    "shared_mcp_tools",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
