"""Task sets of verifiers (v1): their prompts, tools and rewards, without their harnesses."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, NamedTuple

from pydantic_core import to_json

from runner.environment.environment import Environment
from runner.episode.conversation import Conversation
from runner.errors import BadEnvironment, BadOption, BadTask, ToolError, first_line
from runner.interop.packages import optional_package
from runner.messages import Message, Prompt, as_messages
from runner.options import Limits
from runner.scoring import metric, reward
from runner.tasks import Task
from runner.tools.tool import Tool

__all__ = ["Verifiers"]

_SECRET: Final = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|_KEY(_|$)|_AUTH(_|$)", re.IGNORECASE)
"""Parts of the names of environment variables that hold secrets, such as HF_TOKEN."""


class Verifiers(Environment):
    """A task set of verifiers 0.4 (`--set taskset=NAME`), an installed package that exports a `Taskset`.

    The model has the tools of the task set and of the task, which run in this process. The task defines the rewards,
    metrics and stop conditions. Task sets that need their own container, harness or environment are refused.
    """

    package = ("verifiers", "verifiers")
    limits = Limits(turns=100)

    def __init__(self, taskset: Any, config: Mapping[str, Any] | None = None) -> None:
        """Choose the task set.

        Args:
            taskset: the id of the task set, which is the name of a package; in Python also a `Taskset` object.
            config: values of the task set's config, by field.

        Raises:
            BadEnvironment: a package is missing, or the task set needs an unsupported feature.
            BadOption: the config is invalid.
        """
        _verifiers("verifiers.v1")
        if isinstance(taskset, str):
            self._taskset = _loaded(taskset, json.dumps(dict(config or {}), sort_keys=True))
        elif config:
            raise BadOption("Verifiers(config=): a Taskset object has its own config: leave config= out.")
        else:
            self._taskset = taskset
        self._kind = self._taskset.task_type()
        if self._kind.NEEDS_CONTAINER:
            raise BadEnvironment(
                f"the tasks of {type(self._taskset).__name__} need a container, which is not supported: give another "
                "task set."
            )
        self._task: Any = None
        self._trace: Any = None
        self._runtime: Any = None
        self._stops: list[Any] = []
        self._states: dict[type, Any] = {}
        self._given = self._recorded = 0

    def tasks(self) -> Iterator[Task]:
        """The tasks, read as they are needed. The id of a task is its own id, its name, or a hash of its content.

        Raises:
            BadTask: a task has no prompt, or its prompt contains something other than text.
        """
        for task in self._taskset:
            name = task.data.id or task.data.name or task.key[:16]
            data = task.data.model_dump(mode="json", exclude_defaults=True)
            yield Task(id=name, prompt=_prompt(task.data, name), info={"data": data})

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[list[Any]]:
        """The tools that all episodes share; an empty list if the task set has none."""
        async with AsyncExitStack() as stack:
            toolsets = type(self._taskset).toolsets(self._taskset.config)
            yield [tool for each in toolsets for tool in await _served_tools(each, stack)]

    async def setup(self) -> None:
        """Make verifiers' object of the task, and the trace, the working folder and the tools of the task.

        Raises:
            BadTask: the task needs an unsupported feature.
            BadEnvironment: a tool set of the task has a URL, or a runtime other than `subprocess`.
        """
        data = self._kind.data_type().model_validate(self.task.info["data"])
        self._task = self._kind(data, self._taskset.config.task)
        _refuse_unsupported(self._task, self.task.id)
        trace = _verifiers("verifiers.v1.trace")
        self._stops = self._task.hooks("stop")
        self._trace = trace.Trace(
            task=trace.TraceTask(type=self._kind.__name__, data=data, key=self._task.key, hash=self._task.hash),
            state=_verifiers("verifiers.v1.state").state_cls(self._kind)(),
            agent=trace.AgentInfo(config=_verifiers("verifiers.v1.configs.agent").AgentConfig()),
        )
        runtimes = _verifiers("verifiers.v1.runtimes")
        self._runtime = runtimes.make_runtime(runtimes.SubprocessConfig(), name=self._trace.id)
        self._runtime.env = {**_blank_secrets(), **self._task.runtime_env()}
        stack = self.episode.exit_stack
        stack.push_async_callback(self._runtime.stop)
        await self._runtime.start()
        await _invoke(self._task.setup, {"trace": self._trace, "runtime": self._runtime})
        self.system_prompt = data.system_prompt
        served = list(self.shared)
        for toolset in self._task.toolsets(self._task.config):
            served += await _served_tools(toolset, stack, data)
        self.tools += [self._tool(each) for each in served]

    async def rollout(self, conversation: Conversation) -> None:
        """Generate turns and run their calls, until a turn has no calls or a stop condition of the task holds."""
        self._given = len(conversation.messages)
        while not await self._is_stopped(conversation):
            turn = await conversation.generate()
            if not turn.tool_calls:
                return
            conversation.add(*await conversation.call_tools(turn))

    @reward
    async def total(self) -> float | None:
        """The weighted sum of the task's rewards; None if the task has no rewards."""
        trace = self._trace
        self._record(self.episode.conversation())
        trace.ok = True
        trace.stop(self.episode.reason or "agent_completed")
        available = {"trace": trace, "runtime": self._runtime}
        await _invoke(self._task.finalize, available)
        await self._task.score(trace, self._runtime)
        return trace.reward if trace.rewards else None

    @metric
    def task_metrics(self) -> dict[str, float]:
        """The task's rewards by name, before their weights, and its metrics."""
        rewards = {name: each.score for name, each in self._trace.rewards.items() if each is not None}
        return rewards | {name: each for name, each in self._trace.metrics.items() if each is not None}

    async def _is_stopped(self, conversation: Conversation) -> bool:
        if not self._stops:
            return False
        self._record(conversation)
        for stop in self._stops:
            result = _invoke(stop, {_verifiers("verifiers.v1.trace").Trace: self._trace})
            if await result if inspect.isawaitable(result) else result:
                self._trace.stop(stop.__name__)
                self.episode.end(stop.__name__)
                return True
        return False

    def _record(self, conversation: Conversation) -> None:
        """Add the new messages of a conversation to the trace, each as a node. Nodes of turns have token ids."""
        graph, trace = _verifiers("verifiers.v1.graph"), _verifiers("verifiers.v1.trace")
        types = _verifiers("verifiers.v1.types")
        turns = iter(conversation.turns[self._trace.num_turns :])
        for message in conversation.messages[self._recorded :]:
            is_turn = message["role"] == "assistant" and self._recorded >= self._given
            self._recorded += 1
            nodes = self._trace.nodes
            node = graph.MessageNode(parent=len(nodes) - 1 if nodes else None, message=_vf_message(types, message))
            nodes.append(node)
            if not is_turn:
                continue
            turn = next(turns)
            node.sampled, node.token_ids = True, list(turn.token_ids)
            node.mask, node.logprobs = [True] * len(node.token_ids), list(map(float, turn.logprobs))
            usage = types.Usage(prompt_tokens=turn.start, completion_tokens=len(node.token_ids))
            finish = "tool_calls" if turn.tool_calls else "length" if turn.finish == "length" else "stop"
            self._trace.calls.append(trace.ModelCall(node=len(nodes) - 1, usage=usage, finish_reason=finish))

    def _tool(self, served: _ServedTool) -> Tool:
        tool = served.tool
        return Tool(
            functools.partial(self._call if tool.is_async else self._call_in_thread, served),
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            raw=True,
            checked=False,  # verifiers itself answers calls with wrong arguments
        )

    async def _call(self, served: _ServedTool, arguments: Mapping[str, Any]) -> str:
        current = _verifiers("verifiers.v1.mcp.server")._call_state
        kind = _verifiers("verifiers.v1.state").state_cls(type(served.toolset))
        shared = self._trace.state
        token = current.set(shared if isinstance(shared, kind) else self._states.setdefault(kind, kind()))
        try:
            return _as_text(await served.tool.run(dict(arguments), None))
        except _mcp("exceptions").ToolError as error:
            raise ToolError(str(error)) from error
        finally:
            current.reset(token)

    def _call_in_thread(self, served: _ServedTool, arguments: Mapping[str, Any]) -> str:
        return asyncio.run(self._call(served, arguments))


class _ServedTool(NamedTuple):
    """A tool as verifiers would serve it, and the tool set of the tool."""

    toolset: Any
    tool: Any


async def _served_tools(toolset: Any, stack: AsyncExitStack, data: Any = None) -> list[_ServedTool]:
    """Start a tool set in this process, for a task if `data` is given, and return its tools.

    Raises:
        BadEnvironment: the tool set has a URL, or a runtime other than `subprocess`.
    """
    config = toolset.config
    place = getattr(getattr(config, "runtime", None), "type", "subprocess")
    if getattr(config, "url", None) or place != "subprocess":
        raise BadEnvironment(
            f"the tool set {type(toolset).__name__} runs elsewhere ({getattr(config, 'url', None) or place}), which is "
            "not supported: set its runtime to subprocess, without a url."
        )
    await stack.enter_async_context(toolset._exit_stack)
    await toolset.setup()
    if data is not None:
        await toolset.setup_task(data)
    found = []
    for function in _verifiers("verifiers.v1.utils.decorators").discover_decorated(toolset, "tool"):
        name = getattr(function, "tool_name", None) or function.__name__
        name = f"{toolset.server_name}_{name}" if toolset.server_name else name
        description = (function.__doc__ or "").strip() or name
        made = _mcp("tools.base").Tool.from_function(function, name=name, description=description)
        found.append(_ServedTool(toolset, made))
    return found


def _blank_secrets() -> dict[str, str]:
    """Return "" for each environment variable with a secret; verifiers passes all variables to child processes."""
    return {name: "" for name in os.environ if _SECRET.search(name)}


def _refuse_unsupported(task: Any, name: str) -> None:
    """Raise BadTask if a task needs a container, or has a hook that reads requests to the model."""
    for field in ("image", "skills", "agent_user", "artifacts"):
        if getattr(task.data, field):
            raise BadTask(f"task {name!r:.80} needs a container ({field}), which is not supported: leave the task out.")
    decorators, session = _verifiers("verifiers.v1.utils.decorators"), _verifiers("verifiers.v1.session")
    hooks = list(decorators.discover_decorated(task, "intercept"))
    trace = _verifiers("verifiers.v1.trace").Trace
    hooks += [stop for stop in task.hooks("stop") if session.hook_boundary(stop, allow_trace=True) is not trace]
    if hooks:
        raise BadTask(
            f"task {name!r:.80}: {hooks[0].__name__} reads requests, which is not supported: leave the task out."
        )


def _prompt(data: Any, name: str) -> Prompt:
    if data.prompt is None:
        raise BadTask(
            f"task {name!r:.80} has no prompt: a user opens its conversation, which is not supported. Leave it out."
        )
    if isinstance(data.prompt, str):
        return str(data.prompt)
    for message in data.prompt:
        for part in message.content if isinstance(message.content, list) else ():
            if part.type != "text":
                raise BadTask(
                    f"task {name!r:.80} has content of type {part.type!r:.40} in its prompt, and only text is "
                    "supported: leave the task out."
                )
    return as_messages([message.model_dump(exclude_none=True) for message in data.prompt])


def _vf_message(types: Any, message: Message) -> Any:
    """Return a message as an object of verifiers; `types` is the module of its message classes."""
    content = message["content"]
    if message["role"] == "assistant":
        calls = [
            types.ToolCall(
                id=call["id"], name=call["function"]["name"], arguments=json.dumps(call["function"]["arguments"])
            )
            for call in message.get("tool_calls", ())
        ]
        reasoning = message.get("reasoning_content")
        return types.AssistantMessage(content=content, reasoning_content=reasoning, tool_calls=calls or None)
    if message["role"] == "tool":
        return types.ToolMessage(tool_call_id=message["tool_call_id"], content=content, name=message.get("name"))
    return {"system": types.SystemMessage, "user": types.UserMessage}[message["role"]](content=content)


def _as_text(value: Any) -> str:
    """Return the result of a tool as MCP sends it: text unchanged, list items one by one, other values as JSON."""
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return "\n".join(map(_as_text, value))
    return value if isinstance(value, str) else to_json(value, fallback=str, indent=2).decode()


@functools.cache
def _loaded(name: str, config: str) -> Any:
    """Return the task set of an installed package; `config` is the config as JSON.

    Raises:
        BadEnvironment: the task set cannot be loaded, or needs an unsupported feature.
        BadOption: the config is invalid.
    """
    loaders = _verifiers("verifiers.v1.utils.loaders")
    try:
        kind, environment = loaders.taskset_config_type(name), loaders.environment_class(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise BadEnvironment(
            f"task set {name!r:.60} cannot be loaded ({first_line(error)}): install its package, or correct the name."
        ) from error
    if environment is not _verifiers("verifiers.v1.envs.single_agent").SingleAgentEnv:
        raise BadEnvironment(
            f"task set {name!r} has an environment of its own ({environment.__name__}), which is not supported: give "
            "another task set."
        )
    if loaders.default_harness_id(name) == name:
        raise BadEnvironment(f"task set {name!r} has its own harness, which is not supported: give another task set.")
    try:
        return loaders.load_taskset(kind.model_validate({**json.loads(config), "id": name}))
    except ValueError as error:
        raise BadOption(f"config of task set {name!r}: {' '.join(str(error).split()):.300}: correct config=.") from None


def _invoke(function: Any, available: Mapping[Any, Any]) -> Any:
    return _verifiers("verifiers.v1.utils.decorators").invoke(function, available)


@functools.cache
def _mcp(module: str) -> Any:
    return optional_package(f"mcp.server.mcpserver.{module}", extra="verifiers", package="mcp")


@functools.cache
def _verifiers(module: str) -> Any:
    return optional_package(module, extra="verifiers", least="0.4")
