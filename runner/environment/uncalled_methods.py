"""Search for methods and settings of an environment that are never used, since they are misspelt or replaced."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any, Final

from runner.environment.environment import HOOKS, Environment

__all__ = ["uncalled_methods"]

HOOK_SYNONYMS: Final = {
    "setup": "set_up setUp on_setup on_start async_setup initialize initialise reset setup_episode start_episode",
    "close": "tear_down teardown tearDown cleanup clean_up aclose shutdown dispose on_close on_end on_finish "
    "close_episode",
    "prompt": "get_prompt make_prompt initial_prompt build_prompt first_message initial_observation prompts",
    "step": "on_step env_step env_response respond on_turn after_turn step_async",
    "rollout": "roll_out rollouts run_episode play_episode play run loop",
    "tasks": "get_tasks load_tasks make_tasks get_dataset load_dataset dataset task_list",
    "lifespan": "life_span lifetime on_startup",
    "@reward": "reward rewards get_reward compute_reward reward_fn calculate_reward score scores scoring get_score "
    "compute_score grade evaluate",
    "@metric": "metric metrics get_metrics compute_metrics",
    "@group_reward": "group_reward group_rewards",
}
"""Other names for hooks and decorators, most of them from other libraries."""

SETTING_SYNONYMS: Final = {
    "system_prompt": "system system_message sys_prompt instructions system_instruction",
    "limits": "limit max_turns turn_limit max_steps max_tokens",
    "sampling": "sampling_params sampling_parameters generation_config temperature",
    "tool_choice": "toolchoice tool_use",
}
"""Other names for settings of the class, most of them from other libraries."""

_SETTING_BY_NAME: Final = {name: setting for setting, names in SETTING_SYNONYMS.items() for name in names.split()}
_HOOK_BY_NAME: Final = {
    name: hook for hook, names in HOOK_SYNONYMS.items() for name in names.split() if name not in HOOKS
}
_MIN_SIMILARITY: Final = 0.8


def uncalled_methods(environment: Environment[Any]) -> Iterator[str]:
    """Yield messages about methods that look like hooks and are never called, and settings that are never read.

    A method or setting whose name occurs in a method of the class counts as used.
    """
    cls = type(environment)
    own = [base for base in cls.__mro__ if base not in Environment.__mro__]
    written = {name: value for base in reversed(own) for name, value in vars(base).items()}
    mentioned = {name for base in own for value in vars(base).values() for name in _names_in(value)}
    marked = {tool.attribute for tool in environment.method_tools} | {scorer.name for scorer in environment.scorers}
    for name, value in written.items():
        if name.startswith("_") or name in marked or name in mentioned:
            continue
        if not inspect.isroutine(_function(value)):
            if setting := _SETTING_BY_NAME.get(name):
                yield (
                    f"{cls.__name__}.{name} is never read: the setting is called {setting}. Begin its name with _ if "
                    "other code reads it."
                )
            continue
        where = f"{cls.__name__}.{name}()"
        if name == "finished" and not ({"__iter__", "__aiter__"} & written.keys()):
            yield (
                f"{where} is never called: results are sent to the object that `tasks()` returns, or the run's "
                f"tasks. Define it in the class of that object, next to __iter__ or __aiter__."
            )
        elif name in HOOKS or hasattr(Environment, name):
            continue
        elif meant := _HOOK_BY_NAME.get(name) or next(
            iter(difflib.get_close_matches(name, HOOKS, 1, _MIN_SIMILARITY)), ""
        ):
            is_mark = meant.startswith("@")
            fix = f"mark it with {meant}" if is_mark else f"the hook is called {meant}()"
            yield f"{where} is never called: {fix}, or begin its name with _ if other code calls it."
    if "step" in written and "rollout" in written and not {"step", "answer"} & mentioned and not _calls_super(written):
        yield (
            f"{cls.__name__}.step() is never called: rollout() replaces it. Call it in rollout() with "
            f"`await self.episode.answer(turn)`."
        )


def _calls_super(written: dict[str, Any]) -> bool:
    """Return True if `rollout` uses `super`: the `rollout` of the base class calls `step`."""
    return "super" in set(_names_in(written["rollout"]))


def _function(value: Any) -> Any:
    return getattr(value, "__func__", value)  # the function of a static method or class method


def _names_in(value: Any) -> Iterator[str]:
    """Yield the names that occur in a method and its inner functions."""
    found = value.fget if isinstance(value, property) else _function(value)
    codes = [getattr(inspect.unwrap(found), "__code__", None)] if callable(found) else []
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            yield from code.co_names
            # Names in strings count too, such as for getattr().
            yield from (each for each in code.co_consts if isinstance(each, str) and each.isidentifier())
            codes += code.co_consts
