"""The episode: what the runner knows of one play, as the environment's author sees it in `self.episode`."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from runner.chat_requests import ChatCall
from runner.checked import whole
from runner.concurrency.clocks import Waiting, loop_time
from runner.endpoint.endpoint import Endpoint, serving
from runner.episode.conversation import Conversation, open_conversation
from runner.episode.hooks import check_reply
from runner.episode.key import MAIN, task_rng
from runner.episode.serving import Overflow, SentHistory, ServedEpisode, Train, model_name
from runner.episode.state import ConversationState, EpisodeState
from runner.messages import Message, Prompt, as_messages
from runner.options import Sampling, ToolChoice
from runner.tools.tool import Tool
from runner.trajectory import Turn

__all__ = ["Episode"]


class Episode:
    """What the runner knows of this play of a task."""

    turn: Turn
    """The turn that is being answered, or that was answered last."""

    def __init__(self, episode: EpisodeState) -> None:
        self.id: str = episode.key.id
        """The task's id and the number of the episode within its group, as in "task#0"."""
        self.index: int = episode.key.index
        """The number of the episode within its task's group."""
        self.seed: int = episode.seed
        """The seed of the episode's sampling; it differs within a group."""
        self.reason: str = ""
        """The reason that `end(reason)` was called with; "" before, or where it was given none."""
        self._state = episode
        self._rng: random.Random | None = None

    @property
    def rng(self) -> random.Random:
        """Random numbers of the task: the same for every episode of its group."""
        if self._rng is None:
            key = self._state.key
            self._rng = task_rng(self._state.shared.seed, key.task.id, key.visit)
        return self._rng

    @property
    def conversations(self) -> dict[str, Conversation]:
        """The conversations that are open, by agent."""
        return {name: _seen_by_author(state) for name, state in self._state.states.items()}

    @property
    def turns(self) -> list[Turn]:
        """The turns of `main`, in order."""
        main = self._state.states.get(MAIN)
        return main.turns if main else []

    @property
    def text(self) -> str:
        """What `main` said last, but for what was left out; "" if it never spoke."""
        return next((turn.text for turn in reversed(self.turns) if not turn.left_out), "")

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return self._state.limits.ended_by_author

    @property
    def exit_stack(self) -> AsyncExitStack:
        """Holds what `setup()` enters in it; it is unwound after `close()`, also if `setup()` failed.

        It can be entered in `setup()` only. What a synchronous `setup()` entered is left in a worker thread, each exit
        within `Limits.close_seconds`; what an asynchronous one entered is left on the event loop, in the episode's own
        task.
        """
        if not self._state.exit_stack_open:
            raise RuntimeError(
                "episode.exit_stack can be entered in setup() only: what is opened later, in a tool for one, belongs "
                "to another task; open it with `async with` where it is used."
            )
        return self._state.exit_stack

    def end(self, reason: str = "") -> None:
        """End the episode: what is being answered is answered, there is no further turn, and it is scored.

        Args:
            reason: kept as the trajectory's `reason`.

        Raises:
            TypeError: the reason is not text.
        """
        if not isinstance(reason, str):
            raise TypeError(f"Episode.end(reason={reason!r:.60}): the reason is text, got {type(reason).__name__}")
        self._state.limits.ended_by_author = True
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
            train: what it says becomes a trajectory of its own, to be trained on.
            sampling: goes over the run's and the class's.

        Raises:
            BadOption: an agent on an engine of its own cannot be trained.
            TypeError: the name is not text.
            RuntimeError: `main` is not open yet; it is after `prompt()`.
        """
        if not isinstance(name, str):
            raise TypeError(f"Episode.conversation({name!r:.60}): the name of an agent is text: give str(name)")
        if name in self._state.states:
            return _seen_by_author(self._state.states[name])
        if name == MAIN:
            raise RuntimeError("agent 'main' is opened after prompt(), by the runner; name another one before that.")
        return open_conversation(
            self._state, name, system_prompt=system_prompt, prompt=prompt, tools=tools, train=train, sampling=sampling
        )

    async def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any] | Tool] = (),
        sampling: Sampling | None = None,
        tool_choice: ToolChoice | None = None,
        label: str = "",
        train: bool | None = None,
        handles: Sequence[str] = (),
        system_as_user: bool = False,
    ) -> Turn:
        """Answer a loop that is not ours: it asks with its whole history, and a conversation of the episode answers.

        Where the history goes on from turns of the episode, their very ids are gone on from; what the history is
        found to be stands in the trajectory's `requests`. What several ask at once is answered side by side. A
        client whose last turn was cut by its own cancellation may ask the same again.

        Any task may ask, and threads by `anyio.from_thread.run`. `turn.as_message()` is what the client is to append.

        Args:
            messages: the whole history, as a client of OpenAI's chat has it; developers speak as the system.
            tools: the tools that may be called: schemas in OpenAI's form.
            sampling: how the client would have the turn sampled. In a thread that is trained the run's sampling wins,
                but for `stop`, `stop_ids`, `schema`, `regex` and `choice`; of two `max_tokens` the smaller one.
            tool_choice: whether the turn may, must or must not call a tool.
            label: the client's own name for who asks, such as the id of a sub-agent.
            train: whether a thread that begins with this request is trained; None trains those that offer tools.
            handles: what else the client sends back that names a turn (`Turn.handle`).
            system_as_user: system messages in mid-conversation are put before the model as a user's, for templates
                that take none there.

        Raises:
            EpisodeOver: the episode has ended or a limit was reached.
            BadInput: the messages, tools or sampling cannot be used.
        """
        asked = ChatCall(
            messages=[{"role": "user", "content": messages}] if isinstance(messages, str) else messages,
            tools=tools,
            sampling=sampling,
            tool_choice=tool_choice,
            label=label,
            train=train,
            handles=handles,
            system_as_user=system_as_user,
        )
        return await self._state.chat_service.ask(asked)

    @asynccontextmanager
    async def serve(
        self,
        *,
        train: Train = None,
        overflow: Overflow = "tell",
        history: SentHistory = "append",
        system_as_user: bool = False,
        at_once: int = 64,
    ) -> AsyncIterator[Endpoint]:
        """Serve the episode to agent programs over HTTP while the block runs, in `rollout`.

        They ask in the form of OpenAI's Chat Completions or Responses or of Anthropic's Messages, and are answered as
        by `chat`: the very ids of the turns that their history tells are gone on from.

        Args:
            train: whether what is said is trained on: a bool, or a function of the thread that begins; None trains
                threads that are offered tools.
            overflow: what becomes of a history that does not fit the context: "tell" the client, which may send a
                shorter one, or "end" the episode.
            history: "append" goes on from the very ids of what the model said, also of what the client left out of
                it; "client" has the history as the client sends it, rendered anew at every request.
            system_as_user: system messages in mid-conversation are put before the model as a user's, for templates
                that take none there; Claude Code sends such messages.
            at_once: how many requests may be in flight; further ones are told to wait.

        Raises:
            BadOption: a value cannot be, nothing can listen there, or the server's library is not installed.
            RuntimeError: the episode is not in its `rollout`.
        """
        episode = self._state
        whole(f"serve(at_once={at_once!r:.60})", at_once, least=1)
        if not episode.chat_service.is_open:
            raise RuntimeError(
                "episode.serve() is for rollout(): before and after it, and in a tool of an environment without a "
                "rollout of its own, nobody could be answered."
            )
        served = ServedEpisode(episode, train=train, overflow=overflow, history=history, system_as_user=system_as_user)
        chat = episode.shared.chat_of(MAIN)
        episode.report_activity("serving")
        async with serving(
            episode.shared.endpoints,
            served,
            served.threads,
            model=model_name(chat),
            context=chat.engine.context,
            max_requests=at_once,
        ) as endpoint:
            yield endpoint

    async def answer(self, turn: Turn) -> list[Message] | None:
        """Answer a turn: run its calls, or ask `step(turn)` where it makes none.

        Args:
            turn: a turn of any agent of the episode.

        Returns:
            The messages to be added to its conversation; None where `step` ends the episode.
        """
        self.turn = turn
        began = loop_time()
        try:
            if turn.tool_calls:
                return await self._state.states[turn.agent].conversation.call_tools(turn)
            return await self._step(turn)
        finally:
            turn.timings.environment += loop_time() - began

    async def _step(self, turn: Turn) -> list[Message] | None:
        episode = self._state
        if not episode.environment.overrides("step"):
            return None
        episode.report_activity("step")
        seconds = episode.limits.configured.step_seconds
        reply = await episode.author_code.call(episode.environment.step, turn, name="step()", seconds=seconds)
        if reply is None:
            return None
        check_reply("step", reply)
        messages = as_messages(reply)
        if not messages:
            raise ValueError(
                "step() returned an empty list: there is nothing to answer; return None to end the episode"
            )
        return messages

    @asynccontextmanager
    async def limiter(self, name: str, limit: int) -> AsyncIterator[None]:
        """Let at most `limit` of the run's episodes into this block at once; waiting stops their clocks.

        Args:
            name: blocks of the same name count together.
            limit: how many may be inside, the same wherever the name is used.

        Raises:
            BadOption: the limit is below 1, or another one than before.
        """
        limiter = self._state.shared.limiter(name, limit)
        # On behalf of this block, not of the task: the limiter refuses a task that enters a second one.
        owner = object()
        with Waiting():
            self._state.report_activity(f"limiter {name!r}")
            await limiter.acquire_on_behalf_of(owner)
        try:
            yield
        finally:
            limiter.release_on_behalf_of(owner)


def _seen_by_author(state: ConversationState) -> Conversation:
    assert isinstance(state.conversation, Conversation)  # there is no other kind, and `state` cannot know it
    return state.conversation
