"""Asynchronous reinforcement learning for language models: generation never waits for training.

Importing this package is cheap; the names that workflows, rewards and scripts use are loaded on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_async.api import Act as Act
    from areal_async.api import DescribedTool as DescribedTool
    from areal_async.api import Message as Message
    from areal_async.api import Policy as Policy
    from areal_async.api import Reply as Reply
    from areal_async.api import RewardModel as RewardModel
    from areal_async.api import Rewards as Rewards
    from areal_async.api import ToolCall as ToolCall
    from areal_async.api import ToolResult as ToolResult
    from areal_async.api import Workflow as Workflow
    from areal_async.api import group_workflow as group_workflow
    from areal_async.api import per_node as per_node
    from areal_async.errors import ContextFull as ContextFull
    from areal_async.errors import Reject as Reject
    from areal_async.errors import ToolError as ToolError
    from areal_async.protocol.types import Prompt as Prompt
    from areal_async.rollout.rewards.decorator import reward as reward
    from areal_async.rollout.tools.mcp import mcp_tools as mcp_tools
    from areal_async.rollout.tools.mcp import shared_mcp_tools as shared_mcp_tools
    from areal_async.rollout.tools.schema import tool as tool
    from areal_async.rollout.user_code.task_scope import shared as shared
    from areal_async.runs import Run as Run
    from areal_async.runs import Scores as Scores
    from areal_async.runs import evaluate as evaluate
    from areal_async.runs import train as train

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
    "areal_async.runs": ("Run", "Scores", "evaluate", "train"),
}  # fmt: skip
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
