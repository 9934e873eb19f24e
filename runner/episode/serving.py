"""An episode as its endpoint knows it: its desk, with what the author wants of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import anyio

from runner.chat_requests import ChatCall
from runner.endpoint.endpoint import END_GRACE_SECONDS, ChatThread
from runner.episode.alignment import AS_SENT
from runner.episode.key import MAIN
from runner.episode.model import ChatModel, Model
from runner.episode.outcome import failure
from runner.episode.state import ConversationState, EpisodeState
from runner.errors import BadOption, ContextFull, EpisodeOver
from runner.tokens.decode import text_of_token
from runner.trajectory import Turn
from runner.turn_events import DeliverTurn, TurnEventSink

__all__ = ["Overflow", "SentHistory", "ServedEpisode", "Train", "check_serving", "model_name"]

Train: TypeAlias = "bool | Callable[[ChatThread], bool] | None"
"""Which threads are trained: all, none, those of which a function says so, or by default those that offer tools."""

Overflow: TypeAlias = str
"""What becomes of a history that does not fit: "tell" the client, which may shorten it, or "end" the episode."""

SentHistory: TypeAlias = str
"""Whose words of the past the model sees: "append" what it said itself, by its very ids, also what the client left out;
"client" what the client sends, rendered anew at every request, as a server without us would have it."""


class ServedEpisode:
    """Answers what an endpoint of an episode is asked.

    Args:
        episode: the episode.
        train: which threads are trained.
        overflow: what becomes of a history that does not fit.
        history: whose words of the past the model sees.
        system_as_user: system messages in mid-conversation are put before the model as a user's.
    """

    def __init__(
        self, episode: EpisodeState, *, train: Train, overflow: Overflow, history: SentHistory, system_as_user: bool
    ) -> None:
        if train is not None and not isinstance(train, bool) and not callable(train):
            raise BadOption(f"serve(train={train!r:.60}): give True, False or a function of the thread.")
        check_serving(overflow=overflow, history=history, names=("serve(overflow=)", "serve(history=)"))
        self._episode = episode
        self._chat_service = episode.chat_service
        self._train = train
        self._ends = overflow == "end"
        self._as_sent = history == AS_SENT
        self._system_as_user = system_as_user
        self._told: float | None = None
        self._chat = episode.shared.chat_of(MAIN)

    async def ask(
        self, asked: ChatCall, *, sink: TurnEventSink | None = None, deliver: DeliverTurn | None = None
    ) -> Turn:
        """Have a request answered; see `ChatService.ask`."""
        self._refuse_if_over()
        asked = replace(asked, train=self._trains(asked), system_as_user=self._system_as_user, as_sent=self._as_sent)
        try:
            return await self._chat_service.ask(asked, sink=sink, deliver=deliver)
        except ContextFull:
            if self._ends and self._episode.limits.context_full is not None:
                self._episode.limits.end_episode(self._episode.limits.context_full)
            raise

    async def count(self, asked: ChatCall) -> int:
        """How many ids the prompt of a request has."""
        return await self._chat_service.count(asked)

    def text_of(self, ids: Sequence[int], /) -> str:
        """The texts of ids one after the other; bytes that are no text by themselves stand as `text_of_token` says."""
        if not isinstance(self._chat, ChatModel):
            return ""
        return "".join(text_of_token(self._chat.tokenizer, token_id) for token_id in ids)

    def threads(self) -> list[ChatThread]:
        """The threads so far."""
        return [_seen(thread) for thread in self._chat_service.threads]

    def _trains(self, asked: ChatCall) -> bool | None:
        if self._train is None or isinstance(self._train, bool):
            return self._train
        names = [_tool_name(tool) for tool in asked.tools]
        try:
            return bool(self._train(ChatThread("", asked.label, names, bool(names), (), ())))
        except Exception as error:  # no client of it can do anything about that
            self._episode.limits.end_episode(failure(error))

    def _refuse_if_over(self) -> None:
        """Say to a client that the episode is over, as often as it asks.

        A turn that is asked for then has the whole play cancelled, and a program could not end by itself.
        """
        ending, now = self._episode.limits.silenced_by, anyio.current_time()
        if ending is None:
            return
        self._told = now if self._told is None else self._told
        if now < self._told + END_GRACE_SECONDS:
            raise EpisodeOver(str(ending))


def check_serving(*, overflow: Overflow, history: SentHistory, names: tuple[str, str]) -> None:
    """Refuse values of the options of serving by their `names`."""
    choices = ((names[0], overflow, ("tell", "end")), (names[1], history, ("append", AS_SENT)))
    for name, value, known in choices:
        if value not in known:
            raise BadOption(f"{name}: give {known[0]!r} or {known[1]!r}, not {value!r:.60}.")


def model_name(chat: Model) -> str:
    """What a model is called to clients: the last part of its path."""
    model = chat.engine.describe().get("model")
    return Path(model).name if isinstance(model, str) else "scripted"


def _seen(thread: ConversationState) -> ChatThread:
    return ChatThread(
        name=thread.name,
        label=next((each.label for each in thread.requests if each.label), ""),
        tools=[tool.name for tool in thread.cursor.tools],
        trained=thread.train,
        turns=list(thread.turns),
        verdicts=[each.verdict for each in thread.requests],
    )


def _tool_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""
