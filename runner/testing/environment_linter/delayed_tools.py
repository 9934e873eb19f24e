"""Delayed tools: of two asynchronous tools of one turn, the chosen one ends later."""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from itertools import count
from typing import Any, Final

from runner.tools.tool import Tool, with_call

__all__ = ["with_delays"]

_PASS_COUNT: Final = 20
"""Passes of the event loop that a delayed call loses at each of its awaits."""


def with_delays(tools: list[Tool], *, later_first: bool) -> list[Tool]:
    """The tools, with every second concurrent call delayed: the later one, or the earlier one with `later_first`.

    Calls still start in order, and run undelayed up to their first await.
    """
    number = count(int(later_first))
    return [_with_delay(tool, number) if tool.is_async and tool.parallel else tool for tool in tools]


def _with_delay(tool: Tool, number: count[int]) -> Tool:
    call = tool.call

    async def called(**arguments: Any) -> Any:
        return await _drive_delayed(call(**arguments), passes=next(number) % 2 * _PASS_COUNT)

    return with_call(tool, called)


@types.coroutine
def _drive_delayed(coroutine: Coroutine[Any, Any, Any], *, passes: int) -> Generator[Any, Any, Any]:
    """Drive the coroutine as its task would, with extra passes of the event loop after each of its awaits."""
    resume: Callable[[], Any] = partial(coroutine.send, None)
    while True:
        try:
            awaited = resume()
        except StopIteration as stop:
            return stop.value
        try:
            value = yield awaited
            for _ in range(passes):
                yield None
            resume = partial(coroutine.send, value)
        except BaseException as error:  # also a cancellation, which belongs to the coroutine
            resume = partial(coroutine.throw, error)
