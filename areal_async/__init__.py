"""Asynchronous reinforcement learning for language models: generation never waits for training.

Importing this package is cheap; the names that workflows and rewards use are loaded on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_async.api import (
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
    from areal_async.protocol.types import Prompt
    from areal_async.rollout.rewards.decorator import reward
    from areal_async.rollout.tools.mcp import mcp_tools, shared_mcp_tools
    from areal_async.rollout.tools.schema import tool
    from areal_async.rollout.user_code.task_scope import shared

__version__ = "0.1.0"

_HOMES = {
    "Act": "areal_async.api",
    "ContextFull": "areal_async.errors",
    "DescribedTool": "areal_async.api",
    "Message": "areal_async.api",
    "Policy": "areal_async.api",
    "Prompt": "areal_async.protocol.types",
    "Reject": "areal_async.errors",
    "Reply": "areal_async.api",
    "RewardModel": "areal_async.api",
    "Rewards": "areal_async.api",
    "ToolCall": "areal_async.api",
    "ToolError": "areal_async.errors",
    "ToolResult": "areal_async.api",
    "Workflow": "areal_async.api",
    "group_workflow": "areal_async.api",
    "mcp_tools": "areal_async.rollout.tools.mcp",
    "per_node": "areal_async.api",
    "reward": "areal_async.rollout.rewards.decorator",
    "shared": "areal_async.rollout.user_code.task_scope",
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
