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

_NAMES = {
    "areal_async.api": (
        "Act", "DescribedTool", "Message", "Policy", "Reply", "RewardModel", "Rewards", "ToolCall", "ToolResult",
        "Workflow", "group_workflow", "per_node",
    ),
    "areal_async.errors": ("ContextFull", "Reject", "ToolError"),
    "areal_async.protocol.types": ("Prompt",),
    "areal_async.rollout.rewards.decorator": ("reward",),
    "areal_async.rollout.tools.mcp": ("mcp_tools", "shared_mcp_tools"),
    "areal_async.rollout.tools.schema": ("tool",),
    "areal_async.rollout.user_code.task_scope": ("shared",),
}  # fmt: skip
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

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
