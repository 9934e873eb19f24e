"""For `deltarunner check`: asynchronous tools of one turn are slowed down, so that another one of them comes first."""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from itertools import count
from typing import Any, Final

from runner.tools.tool import Tool, with_call

__all__ = ["slowed"]

_PASSES: Final = 20
"""Passes of the event loop that one call is held back by, at each of its awaits."""


def slowed(tools: list[Tool], *, later_first: bool) -> list[Tool]:
    """The same tools; of two calls that run together one is slower, the second or, with `later_first`, the first.

    Calls start in their order and do at once what they do before they first wait, as they always do.
    """
    number = count(int(later_first))
    return [_slowed(tool, number) if tool.is_async and tool.parallel else tool for tool in tools]


def _slowed(tool: Tool, number: count[int]) -> Tool:
    call = tool.call

    async def called(**arguments: Any) -> Any:
        return await _held_back(call(**arguments), passes=next(number) % 2 * _PASSES)

    return with_call(tool, called)


@types.coroutine
def _held_back(coroutine: Coroutine[Any, Any, Any], *, passes: int) -> Generator[Any, Any, Any]:
    """Drive the coroutine as its task would, and let the event loop pass some times after each of its awaits."""
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
        except BaseException as error:  # a cancellation too: it is passed on to the coroutine
            resume = partial(coroutine.throw, error)
