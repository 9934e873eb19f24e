"""The episode: what the runner knows of one play, as the environment's author sees it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from runner.concurrency.clocks import Waiting
from runner.concurrency.exits import EpisodeExitStack, Leave
from runner.episode.conversation import Conversation, ConversationSetting
from runner.episode.tool_calls import answer_calls
from runner.errors import BadOption
from runner.messages import Message, Prompt, as_messages
from runner.options import Limits, Sampling, ToolChoice
from runner.seeds import derive_seed
from runner.trajectory import Turn

if TYPE_CHECKING:
    from runner.concurrency.user_code import AuthorCode
    from runner.environment.environment import Environment
    from runner.episode.context import RunContext
    from runner.episode.limits import EpisodeLimits
    from runner.tasks import Task
    from runner.tools.tool import Tool

__all__ = ["MAIN", "Episode", "EpisodeKey"]

MAIN = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKey:
    """Which play of which task this is.

    Attributes:
        task: what is played.
        index: which of the task's group.
        visit: which visit, where a source repeats tasks.
        attempt: counts from 0.
    """

    task: Task
    index: int = 0
    visit: int = 0
    attempt: int = 0

    @property
    def id(self) -> str:
        visit = f"@{self.visit}" if self.visit else ""
        return f"{self.task.id}{visit}#{self.index}"


class Episode:
    """What the runner knows of this play.

    Attributes:
        id: the task's id and the index within its group.
        index: which of the task's group.
        seed: of its sampling; differs within a group.
        turn: the turn that is being answered.
        ended: `end()` was called.
        reason: what it was given.
    """

    turn: Turn

    def __init__(
        self,
        key: EpisodeKey,
        context: RunContext,
        environment: Environment[Any],
        allowance: EpisodeLimits,
        author: AuthorCode,
        report_activity: Callable[[str], None],
        leave: Leave,
    ) -> None:
        self.id = key.id
        self.index = key.index
        self.seed = derive_seed(context.seed, key.task.id, key.visit, key.index)
        self.reason = ""
        self.conversations: dict[str, Conversation] = {}
        self.stack = EpisodeExitStack(leave, f"episode {self.id} of {type(context.environment).__name__}")
        self.stack_open = False
        self._heeded: Limits | None = None
        self._rng: random.Random | None = None
        self._key = key
        self._context = context
        self._environment = environment
        self._allowance = allowance
        self._author = author
        self._report_activity = report_activity

    @property
    def rng(self) -> random.Random:
        """Random numbers of the task: the same for every episode of its group."""
        if self._rng is None:
            self._rng = task_rng(self._context.seed, self._key.task.id, self._key.visit)
        return self._rng

    @property
    def turns(self) -> list[Turn]:
        """The turns of `main`."""
        main = self.conversations.get(MAIN)
        return main.turns if main else []

    @property
    def text(self) -> str:
        """What `main` said last; "" if it never spoke."""
        return self.turns[-1].text if self.turns else ""

    @property
    def ended(self) -> bool:
        return self._allowance.ended_by_author

    @property
    def exit_stack(self) -> AsyncExitStack:
        """Enter it in `setup()` only; it is unwound after `close()`, also if `setup()` failed.

        What a synchronous `setup()` entered is left in a worker thread, each exit within `Limits.close_seconds`; what
        an asynchronous one entered is left on the event loop, in the episode's own task.
        """
        if not self.stack_open:
            raise RuntimeError(
                "episode.exit_stack can be entered in setup() only: what is opened later, in a tool for one, belongs "
                "to another task; open it with `async with` where it is used."
            )
        return self.stack

    def end(self, reason: str = "") -> None:
        """No further turn: what is being answered is answered, then the episode is scored."""
        self._allowance.ended_by_author = True
        self.reason = reason or self.reason

    def conversation(
        self,
        name: str = MAIN,
        *,
        system_prompt: str | None = None,
        prompt: Prompt = (),
        tools: Sequence[Tool] = (),
        train: bool = False,
        sampling: Sampling | None = None,
    ) -> Conversation:
        """The conversation of an agent: opened at its first call, the same one after.

        Args:
            name: the agent; `main` is the one that `rollout` gets.
            system_prompt: its system message.
            prompt: its first messages.
            tools: what it may call.
            train: its sampled ids become a trajectory of their own.
            sampling: goes over the run's and the class's.

        Raises:
            BadOption: an agent on an engine of its own cannot be trained.
            RuntimeError: `main` is not open yet; it is after `prompt()`.
        """
        if name in self.conversations:
            return self.conversations[name]
        if name == MAIN:
            raise RuntimeError("agent 'main' is opened after prompt(), by the runner; name another one before that.")
        return self.open_conversation(
            name, system_prompt=system_prompt, prompt=prompt, tools=tools, train=train, sampling=sampling
        )

    def open_conversation(
        self,
        name: str,
        *,
        system_prompt: str | None,
        prompt: Prompt,
        tools: Sequence[Tool],
        train: bool,
        sampling: Sampling | None = None,
    ) -> Conversation:
        """Open the conversation of an agent that has none; see `conversation`."""
        if train and name in self._context.other_models:
            raise BadOption(
                f"agent {name!r} plays on an engine of its own (engines={{{name!r}: ...}}): it is not trained."
            )
        messages: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
        conversation = Conversation(
            name,
            self._setting(name, train=train, sampling=sampling),
            train=train,
            tools=tools,
            messages=[*messages, *as_messages(prompt)],
            late=bool(self.conversations),
        )
        self.conversations[name] = conversation
        return conversation

    async def answer(self, turn: Turn) -> list[Message] | None:
        """Run the turn's tools, or `step(turn)`, with their clocks; None ends the episode."""
        self.turn = turn
        began = anyio.current_time()
        try:
            if turn.tool_calls:
                return await self.conversations[turn.agent].call_tools(turn)
            if not self._environment.overrides("step"):
                return None
            self._report_activity("step")
            limit = self._allowance.limits.step_seconds
            reply = await self._author.call(self._environment.step, turn, name="step()", seconds=limit)
            return None if reply is None else _nonempty(as_messages(reply))
        finally:
            turn.timings.environment += anyio.current_time() - began

    @asynccontextmanager
    async def limiter(self, name: str, limit: int) -> AsyncIterator[None]:
        """At most `limit` at once in the whole run; waiting stops the clocks."""
        limiter = self._context.limiter(name, limit)
        owner = object()
        with Waiting():
            self._report_activity(f"limiter {name!r}")
            await limiter.acquire_on_behalf_of(owner)
        try:
            yield
        finally:
            limiter.release_on_behalf_of(owner)

    def _setting(self, name: str, *, train: bool, sampling: Sampling | None) -> ConversationSetting:
        return ConversationSetting(
            chat=self._context.chat_of(name),
            allowance=self._allowance,
            episode=self.id,
            sampling=self._sampling_now(train=train, conversation=sampling),
            tool_choice=self._tool_choice,
            seed=lambda turn: derive_seed(self.seed, name, turn),
            call_tools=self._call_tools,
            was_said=self._was_said,
            report_activity=self._report_activity,
            workers=self._context.workers,
        )

    def _was_said(self, message: Message) -> bool:
        spoken = message["role"] == "assistant" and bool(message["content"] or message.get("tool_calls"))
        return spoken and any(conversation.has_said(message) for conversation in self.conversations.values())

    def _sampling_now(self, *, train: bool, conversation: Sampling | None) -> Callable[[], Sampling]:
        """What gives the sampling of the next turn: the environment's may be assigned."""
        seen: list[Sampling] = []  # the environment's, and what came of it

        def now() -> Sampling:
            own = self._environment.sampling
            if not seen or own is not seen[0]:
                if not isinstance(own, Sampling):
                    raise BadOption(f"self.sampling = {own!r:.60}: give Sampling(...).")
                made = self._context.sampling_of(train=train, conversation=conversation, environment=own)
                seen[:] = own, made
            self.check_limits()
            return seen[1]

        return now

    def heed_limits(self) -> None:
        """Take over the limits that `setup()` gave its episode.

        Raises:
            BadOption: they cannot be.
        """
        self._heeded = self._environment.limits
        self._allowance.limits = self._context.limits_of(self._heeded)

    def check_limits(self) -> None:
        """Refuse limits that were assigned when they had been read.

        Raises:
            BadOption: there are others than after `setup()`.
        """
        limits = self._environment.limits
        if self._heeded is not None and limits is not self._heeded and limits != self._heeded:
            raise BadOption(
                "self.limits was assigned after setup(), where nothing reads it: assign it in setup(), or give limits "
                "to the class or the run."
            )

    def _tool_choice(self, conversation: Conversation) -> ToolChoice:
        """The environment's, which is meant for `main`: another agent may not have the tool that it names."""
        choice = self._environment.tool_choice
        known = ("auto", "none", *(tool.name for tool in conversation.tools))
        return choice if conversation.name == MAIN or choice in known else "auto"

    async def _call_tools(self, conversation: Conversation, turn: Turn) -> list[Message]:
        try:
            return await answer_calls(
                turn,
                conversation.tools,
                author=self._author,
                seconds=self._allowance.limits.tool_seconds,
                report_activity=self._report_activity,
            )
        except Exception as error:
            if not conversation.train:
                error.add_note(f"in a tool of agent {conversation.name!r}")
            raise


def task_rng(seed: int, task_id: str, visit: int) -> random.Random:
    """The random numbers of a task, shared by its group."""
    return random.Random(derive_seed(seed, "task", task_id, visit))


def _nonempty(messages: list[Message]) -> list[Message]:
    if not messages:
        raise ValueError("step() returned an empty list: there is nothing to answer; return None to end the episode")
    return messages
