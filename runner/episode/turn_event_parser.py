"""A parser of a turn while it is sampled, which sends the turn's events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from runner.episode.model import ChatModel
from runner.episode.parsed_turn import checked_call, closing_length
from runner.messages import ToolCall
from runner.options import ToolChoice
from runner.parsing.events import ContentPiece, Event, FinishedCall, ReasoningPiece
from runner.parsing.parser import CallNumbers
from runner.parsing.spelled_tokens import SpelledTokenStream
from runner.tokens.decode import IncrementalDecoder
from runner.tools.tool import Tool
from runner.turn_events import ToolCalled, TurnEvent, TurnRestarted

__all__ = ["TurnEventParser"]


class TurnEventParser:
    """A parser of a turn's ids, which sends events while the ids are sampled. Together, the events form the turn.

    Ids or text that may be the end of the turn are held back until more text follows.
    """

    def __init__(
        self, chat: ChatModel, tools: Sequence[Tool], tool_choice: ToolChoice, send: Callable[[TurnEvent], None]
    ) -> None:
        self._chat = chat
        self._tools = tools
        self._tool_choice: ToolChoice = tool_choice
        self._send = send
        self._names = {tool.name for tool in tools}
        self._closing = frozenset((*chat.stop_ids, *chat.bridger.closes.of_turn))
        self._begun: tuple[Sequence[int], int, int] = ((), 0, 0)
        self._clear()

    def begin(self, earlier: Sequence[int], *, calls_before: int, longest_stop: int) -> None:
        """Begin a turn.

        Args:
            earlier: ids of earlier turns of the same message, whose events were sent before.
            calls_before: number of calls in the conversation before the message.
            longest_stop: length of the longest stop string in characters; 0 without one.
        """
        self._begun = (earlier, calls_before, longest_stop)
        self._clear()

    def feed(self, ids: Sequence[int]) -> None:
        """Parse newly sampled ids, and send their events."""
        self._take(ids, self._events_of)

    def restart(self) -> None:
        """Discard all sampled ids of the turn, and send `TurnRestarted`."""
        self._clear()
        self._send(TurnRestarted())

    def finish(self, *, stopped: bool, text: str | None) -> None:
        """End the turn.

        Args:
            stopped: True if the last id ended the turn, and so is not part of its text.
            text: text before the stop string that ended the turn, from the beginning of its message; None without a
                stop string.
        """
        if text is None:
            ids = list(self._held)[: len(self._held) - stopped]
            self._decode(ids[: len(ids) - closing_length(ids, self._chat)])
            self._emit(self._decoder.finish(), -1)
        else:
            self._decode(self._held)
            self._cut(len(text))
        self._held.clear()
        self._release(0, self._events_of)
        self._events_of(self._stream.finish())

    # --- from ids to text

    def _clear(self) -> None:
        earlier, before, self._longest_stop = self._begun
        self._decoder = IncrementalDecoder(self._chat.tokenizer)
        self._spelling = SpelledTokenStream(self._chat.parser.marker_tokens)
        self._stream = self._chat.parser.stream(self._tools, self._tool_choice)
        self._number = CallNumbers(self._chat.parser.format, before)
        self._held = deque[int]()  # ids that may end the turn
        self._pieces = deque[tuple[str, int]]()  # text that may begin a stop string, each piece with its last id
        self._length = 0  # characters of all text so far
        self._waiting = 0  # characters in `_pieces`
        self._take(earlier, self._note)

    def _take(self, ids: Sequence[int], use: Callable[[Iterable[Event]], None]) -> None:
        if self._longest_stop:
            # New ids may complete a stop string that began in the held text.
            self._release(self._longest_stop - 1, use)
        for token_id in ids:
            if token_id not in self._closing:
                self._decode(self._held)
                self._held.clear()
                self._decode([token_id])
            else:
                self._held.append(token_id)
        if not self._longest_stop:
            self._release(0, use)

    def _decode(self, ids: Iterable[int]) -> None:
        for token_id in ids:
            self._emit(self._decoder.feed([token_id]), token_id)

    def _emit(self, piece: str, token_id: int) -> None:
        if piece:
            self._pieces.append((piece, token_id))
            self._length += len(piece)
            self._waiting += len(piece)

    def _cut(self, length: int) -> None:
        """Discard the text after this many characters."""
        while self._pieces and self._length > length:
            piece, token_id = self._pieces.pop()
            kept = piece[: max(0, len(piece) - (self._length - length))]
            self._length -= len(piece)
            self._waiting -= len(piece)
            self._emit(kept, token_id if kept == piece else -1)

    def _release(self, waiting: int, use: Callable[[Iterable[Event]], None]) -> None:
        """Parse held pieces of text as long as at least `waiting` characters stay held."""
        while self._pieces and self._waiting - len(self._pieces[0][0]) >= waiting:
            piece, token_id = self._pieces.popleft()
            self._waiting -= len(piece)
            use(self._stream.feed(self._spelling.feed(piece, token_id)))

    # --- from text to events

    def _events_of(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, ReasoningPiece | ContentPiece):
                self._send(type(event)(self._spelling.restored(event.text)))
            else:
                self._send(ToolCalled(self._call(event)))

    def _note(self, events: Iterable[Event]) -> None:
        """Number the calls of earlier turns again. Their events were already sent."""
        for event in events:
            if not isinstance(event, ReasoningPiece | ContentPiece):
                self._call(event)

    def _call(self, event: FinishedCall) -> ToolCall:
        return checked_call(self._number(event.call), self._spelling, self._names, self._chat)
