"""The tool calls of a turn: asynchronous tools run concurrently, synchronous tools in order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import anyio

from runner import wording
from runner.concurrency.user_code import AuthorCode, TooSlow
from runner.errors import ToolError, unwrapped
from runner.messages import Message, ToolCall
from runner.options import UNSET
from runner.tools.results import result_text
from runner.tools.tool import Tool
from runner.trajectory import Turn

__all__ = ["answer_calls"]


async def answer_calls(
    turn: Turn,
    tools: Sequence[Tool],
    *,
    author_code: AuthorCode,
    seconds: float | None,
    report_activity: Callable[[str], None],
) -> list[Message]:
    """Run a turn's calls. Return a tool message for each call that parsed, in order, and one user message for the rest.

    Calls that failed are marked in the turn.

    Raises:
        TooSlow: a synchronous tool took too long, and its thread still runs.
        Exception: a tool raised an error other than `ToolError`; the first such error in the order of the calls.
    """
    known = {tool.name: tool for tool in tools}
    calls = [call for call in turn.tool_calls if call.error is None]
    report_activity(", ".join(f"{call.name}()" for call in calls) or "nothing")
    running = _RunningCalls(known, author_code, seconds)
    try:
        for batch in [calls] if len(calls) == 1 else _between_barriers(calls, known):
            await running.run(batch)
    finally:
        for place, call in enumerate(turn.tool_calls):
            if call.failed != (call.id in running.failed):
                turn.tool_calls[place] = replace(call, failed=not call.failed)
    messages: list[Message] = [
        {"role": "tool", "content": running.results[call.id], "tool_call_id": call.id, "name": call.name}
        for call in calls
    ]
    broken = [wording.malformed_call(call.error) for call in turn.tool_calls if call.error is not None]
    if broken:
        messages.append({"role": "user", "content": "\n".join(broken)})
    return messages


class _RunningCalls:
    def __init__(self, tools: dict[str, Tool], author_code: AuthorCode, seconds: float | None) -> None:
        self.results: dict[str, str] = {}
        self.failed: set[str] = set()
        self._tools = tools
        self._author_code = author_code
        self._seconds = seconds
        self._errors: dict[str, Exception] = {}

    async def run(self, batch: Sequence[ToolCall]) -> None:
        if len(batch) == 1:  # a task group would take as long as a whole turn of a fast environment
            self.results[batch[0].id] = await self._result(batch[0])
            return
        in_order = [call for call in batch if not self._together(call)]
        async with anyio.create_task_group() as group:
            for call in batch:
                if self._together(call):
                    group.start_soon(self._keep, [call], group.cancel_scope)
            if in_order:
                group.start_soon(self._keep, in_order, group.cancel_scope)
        for call in batch:
            if call.id in self._errors:
                raise self._errors[call.id]

    def _together(self, call: ToolCall) -> bool:
        tool = self._tools.get(call.name)
        return tool is not None and tool.is_async

    async def _keep(self, calls: Sequence[ToolCall], siblings: anyio.CancelScope) -> None:
        for call in calls:
            try:
                self.results[call.id] = await self._result(call)
            except Exception as error:
                # The waiting task raises the error later, since a task group would wrap it and lose the order of the
                # calls.
                self._errors[call.id] = error
                siblings.cancel()
                return

    async def _result(self, call: ToolCall) -> str:
        self.failed.add(call.id)
        tool = self._tools.get(call.name)
        if tool is None:
            return wording.unknown_tool(call.name, self._tools)
        seconds = self._seconds if tool.seconds is UNSET else tool.seconds
        try:
            function = partial(_call_async if tool.is_async else _call, tool, tool.arguments(call.arguments))
            text: str = await self._author_code.call(function, name=f"tool {tool.name}()", seconds=seconds)
        except (ToolError, BaseExceptionGroup) as error:
            cause = unwrapped(error)
            if not isinstance(cause, ToolError):
                raise
            return wording.tool_error(str(cause))
        except TooSlow as error:
            if self._author_code.abandoned:
                raise
            return wording.took_longer(tool.name, error.seconds)
        self.failed.remove(call.id)
        return text


# The result is converted to text in the thread of the tool, so that a large result does not block the event loop.
def _call(tool: Tool, arguments: dict[str, object]) -> str:
    return _text(tool, tool.call(**arguments))


async def _call_async(tool: Tool, arguments: dict[str, object]) -> str:
    return _text(tool, await tool.call(**arguments))


def _text(tool: Tool, result: object) -> str:
    try:
        return result_text(result)
    except Exception as error:
        error.add_note(f"this is the result of tool {tool.name}(){_where(tool.call)}")
        raise


def _where(call: Callable[..., object]) -> str:
    """Return the place where a tool is defined, for an error about a result that cannot become text.

    The traceback of such an error does not show the tool.
    """
    code = getattr(inspect.unwrap(call), "__code__", None)
    return f", {code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _between_barriers(calls: Sequence[ToolCall], tools: dict[str, Tool]) -> Iterator[list[ToolCall]]:
    batch: list[ToolCall] = []
    for call in calls:
        tool = tools.get(call.name)
        if tool is None or tool.parallel:
            batch.append(call)
            continue
        if batch:
            yield batch
        yield [call]
        batch = []
    if batch:
        yield batch
