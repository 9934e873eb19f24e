"""The request handler of an episode's endpoint: its chat service with the options of `Episode.serve`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import anyio

from runner.chat_requests import ChatCall
from runner.endpoint.endpoint import END_GRACE_SECONDS, ChatThread
from runner.episode.alignment import AS_SENT
from runner.episode.chat_service import ChatService
from runner.episode.key import MAIN
from runner.episode.model import ChatModel, Model
from runner.episode.outcome import failure
from runner.episode.state import ConversationState, EpisodeState
from runner.errors import BadOption, ContextFull, EpisodeOver
from runner.tokens.decode import text_of_token
from runner.trajectory import Turn
from runner.turn_events import DeliverTurn, TurnEventSink

__all__ = ["Overflow", "SentHistory", "ServedEpisode", "Train", "model_name", "serving_options"]

Train: TypeAlias = "bool | Callable[[ChatThread], bool] | None"
"""Selection of the threads that are trained: all, none, threads for which a function returns True, or by default
threads that offer tools.
"""

Overflow: TypeAlias = str
"""Treatment of a history that does not fit: "tell" the client, which may send a shorter one, or "end" the episode."""

SentHistory: TypeAlias = str
"""Source of the earlier messages in the model's prompt.

"append": the exact sampled ids, also ids that the client left out.
"client": the history that the client sends, rendered again at every request, as without this endpoint.
"""


class ServedEpisode:
    """The handler of an endpoint's requests for one episode.

    Args:
        episode: the episode.
        chat_service: the chat service of the episode.
        train: selects the threads that are trained.
        overflow: treatment of a history that does not fit.
        history: source of the earlier messages in the model's prompt.
        system_as_user: True to change system messages after the beginning to user messages.

    Raises:
        BadOption: a value is not allowed.
    """

    def __init__(
        self,
        episode: EpisodeState,
        chat_service: ChatService,
        *,
        train: Train,
        overflow: Overflow,
        history: SentHistory,
        system_as_user: bool,
    ) -> None:
        if train is not None and not isinstance(train, bool) and not callable(train):
            raise BadOption(
                f"serve(train={train!r:.60}): give True, False, or a function that takes a ChatThread and returns "
                "True or False."
            )
        _check_serving(overflow=overflow, history=history, names=("serve(overflow=)", "serve(history=)"))
        self._episode = episode
        self._chat_service = chat_service
        self._train = train
        self._ends = overflow == "end"
        self._as_sent = history == AS_SENT
        self._system_as_user = system_as_user
        self._over_since: float | None = None
        """Time of the first request that was refused because the episode is over."""
        self._chat = episode.shared.chat_of(MAIN)

    async def ask(
        self, chat_call: ChatCall, *, sink: TurnEventSink | None = None, deliver: DeliverTurn | None = None
    ) -> Turn:
        """Answer a request; see `ChatService.ask`."""
        self._refuse_if_over()
        train = self._trains(chat_call)
        chat_call = replace(chat_call, train=train, system_as_user=self._system_as_user, as_sent=self._as_sent)
        try:
            return await self._chat_service.ask(chat_call, sink=sink, deliver=deliver)
        except ContextFull:
            if self._ends and self._episode.limits.context_full is not None:
                self._episode.limits.end_episode(self._episode.limits.context_full)
            raise

    async def count(self, chat_call: ChatCall) -> int:
        """Return the number of ids in the prompt of a request; see `ChatService.count`."""
        return await self._chat_service.count(chat_call)

    def text_of(self, ids: Sequence[int], /) -> str:
        """Return the text of ids; "" if the engine takes messages. Invalid bytes are written as by `text_of_token`."""
        if not isinstance(self._chat, ChatModel):
            return ""
        return "".join(text_of_token(self._chat.tokenizer, token_id) for token_id in ids)

    def threads(self) -> list[ChatThread]:
        """Return the threads that clients began so far."""
        return [_seen(thread) for thread in self._chat_service.threads]

    def _trains(self, chat_call: ChatCall) -> bool | None:
        if self._train is None or isinstance(self._train, bool):
            return self._train
        names = [_tool_name(tool) for tool in chat_call.tools]
        try:
            return bool(self._train(ChatThread("", chat_call.label, names, bool(names), (), ())))
        except Exception as error:  # this ends the episode, since clients cannot correct the error
            self._episode.limits.end_episode(failure(error))

    def _refuse_if_over(self) -> None:
        """Raise `EpisodeOver` after the end of the episode, during a grace period of `END_GRACE_SECONDS`.

        The period begins with the first request after the end. During the period, the program can still end by itself.
        A later request passes, and its turn cancels the whole rollout.
        """
        ending, now = self._episode.limits.silenced_by, anyio.current_time()
        if ending is None:
            return
        self._over_since = now if self._over_since is None else self._over_since
        if now < self._over_since + END_GRACE_SECONDS:
            raise EpisodeOver(str(ending))


def serving_options(
    train: Train,
    system_as_user: bool,
    overflow: Overflow,
    history: SentHistory,
    *,
    names: tuple[str, str] = ("overflow", "sent_history"),
) -> dict[str, Any]:
    """Check the settings of an environment that serves its episodes, and return the arguments for `Episode.serve`.

    Raises:
        BadOption: a value is not allowed.
    """
    _check_serving(overflow=overflow, history=history, names=names)
    return {"train": train, "system_as_user": system_as_user, "overflow": overflow, "history": history}


def _check_serving(*, overflow: Overflow, history: SentHistory, names: tuple[str, str]) -> None:
    """Raise BadOption for wrong values of serving options; the error uses their `names`."""
    choices = ((names[0], overflow, ("tell", "end")), (names[1], history, ("append", AS_SENT)))
    for name, value, known in choices:
        if value not in known:
            raise BadOption(f"{name}: give {known[0]!r} or {known[1]!r}, not {value!r:.60}.")


def model_name(chat: Model) -> str:
    """Return the model's name for clients: the last part of its path; "scripted" if the engine names no model."""
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
