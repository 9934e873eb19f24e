"""The episode as an environment uses it in `self.episode`."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields
from os import PathLike
from typing import Any

from runner.attachments import MAX_ATTACHED_BYTES, MAX_ATTACHMENTS, make_attachment
from runner.chat_requests import ChatCall
from runner.checked import whole
from runner.concurrency.clocks import Waiting, loop_time
from runner.endpoint.endpoint import Endpoint, serving
from runner.episode.chat_service import ChatService
from runner.episode.conversation import Conversation, open_conversation
from runner.episode.hooks import check_reply
from runner.episode.key import MAIN, task_rng
from runner.episode.serving import Overflow, SentHistory, ServedEpisode, Train, model_name
from runner.episode.state import ConversationState, EpisodeState
from runner.errors import BadOption
from runner.messages import Message, Prompt, as_messages
from runner.options import Sampling, ToolChoice
from runner.sandbox.containers import default_provider
from runner.sandbox.sandbox import Sandbox, SandboxOptions, SandboxProvider
from runner.tools.tool import Tool
from runner.trajectory import Turn

__all__ = ["Episode"]


class Episode:
    """One episode, as the hooks of an environment use it in `self.episode`."""

    turn: Turn
    """The turn that is being answered; at other times, the turn that was answered last."""

    def __init__(self, episode: EpisodeState, chat_service: ChatService) -> None:
        self.id: str = episode.key.id
        """The task's id and the number of the episode within its group, as in "task#0"."""
        self.index: int = episode.key.index
        """The number of the episode within its task's group."""
        self.seed: int = episode.seed
        """The seed of the episode's sampling; it differs within a group."""
        self.reason: str = ""
        """The argument of `end(reason)`; "" before the call, or without an argument."""
        self._state = episode
        self._chat_service = chat_service
        self._rng: random.Random | None = None
        self._has_sandbox = False

    @property
    def rng(self) -> random.Random:
        """The task's random number generator, with the same numbers for every episode of its group."""
        if self._rng is None:
            key = self._state.key
            self._rng = task_rng(self._state.shared.seed, key.task.id, key.visit)
        return self._rng

    @property
    def conversations(self) -> dict[str, Conversation]:
        """The open conversations, by agent."""
        return {name: _seen_by_author(state) for name, state in self._state.conversations.items()}

    @property
    def turns(self) -> list[Turn]:
        """The turns of `main`, in order."""
        main = self._state.conversations.get(MAIN)
        return main.turns if main else []

    @property
    def text(self) -> str:
        """The text of the last turn of `main`, without reasoning and calls; "" before the first turn.

        Turns that `Conversation.keep` excluded from training are skipped.
        """
        return next((turn.text for turn in reversed(self.turns) if not turn.left_out), "")

    @property
    def ended(self) -> bool:
        """True once `end` was called."""
        return self._state.limits.ended_by_author

    @property
    def exit_stack(self) -> AsyncExitStack:
        """A stack for the contexts that `setup()` enters. It is unwound after `close()`, even if `setup()` failed.

        Contexts can be entered in `setup()` only. If `setup()` is synchronous, a worker thread leaves the contexts, and
        each exit may take `Limits.close_seconds`. If it is asynchronous, the episode's own task leaves them on the
        event loop.

        Raises:
            RuntimeError: `setup()` is not running.
        """
        if not self._state.exit_stack_open:
            raise RuntimeError(
                "episode.exit_stack can be entered in setup() only: a context that is opened later, such as in a tool, "
                "belongs to another task; open it with `async with` where it is used."
            )
        return self._state.exit_stack

    def model_of(self, agent: str = MAIN) -> str:
        """Return the name or the folder of an agent's model; "" if its engine has none."""
        return str(self._state.shared.chat_of(agent).engine.describe().get("model", ""))

    def _weights_of(self, agent: str, sampling: Sampling | None) -> list[str]:
        """Return the weights of an untrained agent, as a cache key for its answers; internal."""
        return self._state.shared.weights_of(agent, sampling, self._state.environment.sampling)

    def end(self, reason: str = "") -> None:
        """End the episode. No further turn is taken. The episode is scored once `rollout` has ended.

        Args:
            reason: kept as the trajectory's `reason`.

        Raises:
            TypeError: the reason is not text.
        """
        if not isinstance(reason, str):
            raise TypeError(f"Episode.end(reason={reason!r:.60}): the reason is text, got {type(reason).__name__}")
        self._state.limits.ended_by_author = True
        self.reason = reason or self.reason

    def attach(
        self,
        name: str,
        *,
        text: str | None = None,
        json: Any = None,
        image: Any = None,
        file: bytes | str | PathLike[str] | None = None,
    ) -> None:
        """Attach an artefact for people, such as an image.

        Report pages and `deltarunner show` print it after the turn of `main` that was the latest at the time of this
        call. It is in the run file and in `Trajectory.attachments`, and is not trained on. Give exactly one content.

        Args:
            name: the name that people see; several attachments may have the same name.
            text: a text.
            json: a value that JSON can hold.
            image: a PNG, JPEG, GIF or WebP image: its bytes, its path, or an image of Pillow.
            file: other bytes, or the path of a file.

        Raises:
            BadOption: there is not exactly one content, the content does not fit its argument, or a limit is exceeded:
                8 MiB for each attachment, 32 MiB and 1,000 attachments for an episode.
        """
        made = make_attachment(name, len(self.turns), text=text, json=json, image=image, file=file)
        attached = self._state.attachments
        size = sum(len(each.data) for each in attached) + len(made.data)
        if size > MAX_ATTACHED_BYTES or len(attached) == MAX_ATTACHMENTS:
            raise BadOption(
                f"attach({name!r:.60}): the episode would have {len(attached) + 1:,} attachments with {size:,} bytes. "
                f"At most {MAX_ATTACHMENTS:,} with {MAX_ATTACHED_BYTES:,} bytes are allowed: attach less."
            )
        attached.append(made)

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
        """Return the conversation of an agent. The first call opens it.

        Args:
            name: the agent; `rollout` receives the conversation of `main`.
            system_prompt: the system message.
            prompt: the first messages.
            tools: the tools that the agent may call.
            train: True to train on the turns of the agent, as a trajectory of its own.
            sampling: takes precedence over the sampling of the run and of the class.

        Raises:
            BadOption: `train` is set, and the agent has its own engine or its engine takes messages.
            TypeError: the name is not text.
            RuntimeError: `main` is not open yet; the runner opens it after `prompt()`.
        """
        if not isinstance(name, str):
            raise TypeError(f"Episode.conversation({name!r:.60}): the name of an agent is text: give str(name)")
        if name in self._state.conversations:
            return _seen_by_author(self._state.conversations[name])
        if name == MAIN:
            raise RuntimeError(
                "conversation('main'): the runner opens this conversation after prompt(). Give another name, or call "
                "it later."
            )
        return open_conversation(
            self._state,
            name,
            system_prompt=system_prompt,
            prompt=as_messages(prompt),
            tools=tools,
            train=train,
            sampling=sampling,
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
        """Answer a request with a whole history, from an external agent loop.

        If the history continues turns of the episode, the exact ids of these turns are kept. The relation of the
        history to the turns is recorded in the trajectory's `requests`. Concurrent requests are answered concurrently.
        A client that cancelled a request may send the same request again.

        Any task may call `chat`; a thread calls it by `anyio.from_thread.run`. The client appends `turn.as_message()`
        to its history.

        Args:
            messages: the whole history, as a client of OpenAI's chat has it; developer messages count as system
                messages.
            tools: the tools that may be called: schemas in OpenAI's form.
            sampling: the client's sampling. In a trained or evaluated thread, the run's sampling takes precedence,
                except for `stop`, `stop_ids`, `schema`, `regex` and `choice`. In every thread, the smaller value of
                `max_tokens` and the larger value of `logprobs` apply.
            tool_choice: "auto", "none", "required" or the name of a tool.
            label: the client's own name for the caller, such as the id of a sub-agent.
            train: True to train on a thread that begins with this request; None to train on threads that offer tools.
            handles: further ids that the client sends back, and that name a turn (`Turn.handle`).
            system_as_user: change system messages after the beginning to user messages, for templates that take them
                only at the beginning.

        Raises:
            EpisodeOver: the episode has ended or a limit was reached.
            BadInput: the messages, tools or sampling cannot be used.
        """
        chat_call = ChatCall(
            messages=[{"role": "user", "content": messages}] if isinstance(messages, str) else messages,
            tools=tools,
            sampling=sampling,
            tool_choice=tool_choice,
            label=label,
            train=train,
            handles=handles,
            system_as_user=system_as_user,
        )
        return await self._chat_service.ask(chat_call)

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

        Programs send requests in the form of OpenAI's Chat Completions or Responses, or of Anthropic's Messages. The
        requests are answered as by `chat`: the exact ids of the turns in their history are kept.

        Args:
            train: True to train on all threads, or a function that decides for a new thread; None to train on threads
                that offer tools.
            overflow: treatment of a history that does not fit the context: "tell" the client, which may send a shorter
                history, or "end" the episode.
            history: "append" continues from the exact sampled ids, also ids that the client left out. "client" renders
                the history that the client sends, again at every request.
            system_as_user: change system messages after the beginning to user messages, for templates that take them
                only at the beginning. Claude Code sends such messages.
            at_once: maximum number of requests in flight; further requests are refused as busy.

        Raises:
            BadOption: a value is not allowed, the server cannot listen on the address, or the server's library is not
                installed.
            RuntimeError: the environment's own `rollout` is not running.
        """
        episode = self._state
        whole(f"serve(at_once={at_once!r:.60})", at_once, least=1)
        if not self._chat_service.is_open:
            raise RuntimeError(
                "episode.serve() is for rollout(): before and after it, and in a tool of an environment without a "
                "rollout of its own, requests cannot be answered."
            )
        served = ServedEpisode(
            episode,
            self._chat_service,
            train=train,
            overflow=overflow,
            history=history,
            system_as_user=system_as_user,
        )
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
        """Answer a turn: run its calls, or call `step(turn)` if it has none.

        Args:
            turn: a turn of any agent of the episode.

        Returns:
            The messages to add to the turn's conversation; None if `step` ends the episode, or is not defined.
        """
        self.turn = turn
        began = loop_time()
        try:
            if turn.tool_calls:
                return await self._state.conversations[turn.agent].author_conversation.call_tools(turn)
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

    async def sandbox(
        self,
        image: str | PathLike[str],
        *,
        provider: SandboxProvider | None = None,
        at_once: int | None = None,
        **options: Any,
    ) -> Sandbox:
        """Open a sandbox, in an asynchronous `setup()`; it is removed at the end of the episode.

        Without a provider, the sandbox is a container of podman or docker. Its network is off, and its memory,
        processor cores and processes are limited.

        Args:
            image: the name of an image, or a folder with a Dockerfile, which is built once for each content.
            provider: another provider of sandboxes.
            at_once: maximum number of episodes of the run with a sandbox at the same time; 4 per core by default.
                The clocks of waiting episodes are paused.
            options: fields of `SandboxOptions`, such as `memory_mb=2048` or `network="internet"`.

        Raises:
            BadOption: an option is unknown or invalid.
            SandboxFailed: the sandbox cannot be made: the image is missing, its build fails, or neither podman nor
                docker works.
            RuntimeError: the method is called outside of `setup()`.
        """
        try:
            chosen = SandboxOptions(image=image, **options)
        except TypeError:
            known = [each.name for each in fields(SandboxOptions)]
            unknown = ", ".join(name for name in options if name not in known)
            raise BadOption(f"sandbox({unknown:.60}): unknown option; the options are {', '.join(known)}.") from None
        stack = self.exit_stack
        if not self._has_sandbox:  # later sandboxes do not wait, or two episodes could wait for each other
            await stack.enter_async_context(self.limiter("sandboxes", at_once or 4 * (os.cpu_count() or 1)))
            self._has_sandbox = True
        self._state.report_activity("sandbox")
        return await stack.enter_async_context((provider or default_provider()).open(chosen))

    @asynccontextmanager
    async def limiter(self, name: str, limit: int) -> AsyncIterator[None]:
        """Run this block when fewer than `limit` blocks with this name run, in all episodes of the run.

        The block waits until then, and the clocks are paused while it waits.

        Args:
            name: blocks with the same name share the limit.
            limit: maximum number of blocks that run at the same time; equal for all blocks with this name.

        Raises:
            BadOption: the limit is below 1, or differs from the limit of an earlier block with this name.
        """
        limiter = self._state.shared.limiter(name, limit)
        # The borrower is this block, not the task: the limiter refuses a task that enters twice.
        owner = object()
        with Waiting():
            self._state.report_activity(f"limiter {name!r}")
            await limiter.acquire_on_behalf_of(owner)
        try:
            yield
        finally:
            limiter.release_on_behalf_of(owner)


def _seen_by_author(state: ConversationState) -> Conversation:
    # `author_conversation` has the type of a protocol, since `Conversation` is in a higher layer than
    # `ConversationState`.
    assert isinstance(state.author_conversation, Conversation)
    return state.author_conversation
