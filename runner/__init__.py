"""deltarunner: many multi-turn agent episodes at once against vLLM in the same process, with exact token ids.

Every public name comes from here and is loaded when it is first asked for: importing this package loads nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.engines.base import Engine, EngineStats, FinishReason
    from runner.engines.control import EngineState, PauseMode, WeightUpdate
    from runner.engines.vllm.engine import VllmEngine
    from runner.engines.weights import LocalTransfer, WeightTransfer
    from runner.environment.environment import Environment, Reply
    from runner.environment.task_feed import TaskSource
    from runner.episode.conversation import Conversation
    from runner.episode.episode import Episode
    from runner.errors import (
        BadBatch,
        BadControl,
        BadEnvironment,
        BadInput,
        BadMessage,
        BadModel,
        BadOption,
        BadTask,
        BadTemplate,
        BadWeights,
        ConfigurationChanged,
        DeltarunnerError,
        EngineDead,
        EngineError,
        EngineStalled,
        EpisodeOver,
        NewerRunFile,
        RequestRejected,
        RunFileError,
        RunStopped,
        RunStuck,
        StorageFailed,
        ToolError,
        TooManyFailures,
        WrongArguments,
    )
    from runner.messages import Message, Prompt, ToolCall
    from runner.options import Concurrency, History, HistoryPolicy, Limits, Sampling
    from runner.runs.process import run
    from runner.runs.run import Run
    from runner.runs.summary import Summary
    from runner.scoring import group_reward, metric, reward
    from runner.store.reader import RunFile
    from runner.tasks import Task
    from runner.testing.recorded_replies import ScriptedEngine
    from runner.tokens.prefix_replacement import PrefixReplacement, PrefixResult, replace_prefix_tokens
    from runner.tools.tool import Tool, tool
    from runner.trajectory import Group, Outcome, Segment, Trajectory, Turn

    __version__: str

__all__ = [
    "BadBatch",
    "BadControl",
    "BadEnvironment",
    "BadInput",
    "BadMessage",
    "BadModel",
    "BadOption",
    "BadTask",
    "BadTemplate",
    "BadWeights",
    "Concurrency",
    "ConfigurationChanged",
    "Conversation",
    "DeltarunnerError",
    "Engine",
    "EngineDead",
    "EngineError",
    "EngineStalled",
    "EngineState",
    "EngineStats",
    "Environment",
    "Episode",
    "EpisodeOver",
    "FinishReason",
    "Group",
    "History",
    "HistoryPolicy",
    "Limits",
    "LocalTransfer",
    "Message",
    "NewerRunFile",
    "Outcome",
    "PauseMode",
    "PrefixReplacement",
    "PrefixResult",
    "Prompt",
    "Reply",
    "RequestRejected",
    "Run",
    "RunFile",
    "RunFileError",
    "RunStopped",
    "RunStuck",
    "Sampling",
    "ScriptedEngine",
    "Segment",
    "StorageFailed",
    "Summary",
    "Task",
    "TaskSource",
    "TooManyFailures",
    "Tool",
    "ToolCall",
    "ToolError",
    "Trajectory",
    "Turn",
    "VllmEngine",
    "WeightTransfer",
    "WeightUpdate",
    "WrongArguments",
    "group_reward",
    "metric",
    "replace_prefix_tokens",
    "reward",
    "run",
    "tool",
]

_HOMES = {
    "runner.episode.conversation": ("Conversation",),
    "runner.runs.process": ("run",),
    "runner.engines.base": ("Engine", "EngineStats", "FinishReason"),
    "runner.engines.control": ("EngineState", "PauseMode", "WeightUpdate"),
    "runner.engines.vllm.engine": ("VllmEngine",),
    "runner.engines.weights": ("LocalTransfer", "WeightTransfer"),
    "runner.environment.environment": ("Environment", "Reply"),
    "runner.episode.episode": ("Episode",),
    "runner.messages": ("Message", "Prompt", "ToolCall"),
    "runner.options": ("Concurrency", "History", "HistoryPolicy", "Limits", "Sampling"),
    "runner.runs.run": ("Run",),
    "runner.scoring": ("group_reward", "metric", "reward"),
    "runner.environment.task_feed": ("TaskSource",),
    "runner.store.reader": ("RunFile",),
    "runner.runs.summary": ("Summary",),
    "runner.tasks": ("Task",),
    # From where it can read recorded runs too, which stand above the engines.
    "runner.testing.recorded_replies": ("ScriptedEngine",),
    "runner.tokens.prefix_replacement": ("PrefixReplacement", "PrefixResult", "replace_prefix_tokens"),
    "runner.tools.tool": ("Tool", "tool"),
    "runner.trajectory": ("Group", "Outcome", "Segment", "Trajectory", "Turn"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker would take every misspelt name for a public one

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            value = version("deltarunner")
        elif name in __all__:
            # Every error lives in one module.
            value = getattr(importlib.import_module(_HOME.get(name, "runner.errors")), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
