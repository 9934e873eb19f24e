"""Requests of clients that send their history, and the records of how these requests are handled."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.errors import BadMessage
from runner.options import Sampling, ToolChoice

__all__ = ["Again", "ChatCall", "ChatRequest", "Delivery", "Tolerated", "UnknownReference", "Verdict"]


class UnknownReference(BadMessage):
    """A request names a turn by an id that its episode never returned.

    Args:
        given: the id.
        is_item: True if it is the id of an item, False if it is the id of an earlier response.
    """

    def __init__(self, given: str, *, is_item: bool) -> None:
        what = f"Item with id {given!r}" if is_item else f"Previous response with id {given!r}"
        fix = "give the item itself" if is_item else "give the whole history as input"
        super().__init__(f"{what} not found: no turn of this episode has it; {fix}.")
        self.is_item = is_item


class Verdict(enum.StrEnum):
    """Relation of a request's history to the turns of the episode."""

    APPEND = "append"
    """New messages follow a turn without a successor in its thread, so its segment continues.

    Messages of a client with another label begin their own thread, from the ids up to that turn.
    """
    BRANCH = "branch"
    """New messages follow a turn that already has a successor: a new segment begins with the ids up to that turn."""
    REWOUND = "rewound"
    """The client dropped its last turns and continues from an earlier turn; dropped turns stay trained in their
    segments.

    If the client drops even its first turn, its history is rendered again.
    """
    AGAIN = "again"
    """The history ends exactly where the prompt of a turn ended; `ChatRequest.again` has the handling."""
    CONTINUED = "continued"
    """The history ends with a truncated turn, which continues."""
    FOREIGN = "foreign"
    """The history contains an assistant message that was not sampled: the history is rendered again, with mask 0."""
    RETOLD = "retold"
    """The history has as many turns as were sampled, but with other texts: it is rendered again at every turn."""
    EDITED = "edited"
    """Ids in the history name a turn of this thread, but messages before the turn changed: the history is rendered
    again."""
    TOOLS = "tools"
    """The tools of the request differ from the tools that its history was rendered with: the history is rendered again.
    """
    NEW = "new"
    """The history is unknown: a new thread begins."""


class Again(enum.StrEnum):
    """Handling of a request whose prompt may have been sent before."""

    NO = ""
    """The prompt is new."""
    SIBLING = "sibling"
    """The earlier turn is in flight or was delivered: another turn is sampled from the same ids; both are trained."""
    TAKEN_BACK = "taken_back"
    """The earlier turn was cut since its client disconnected: that turn is not trained, and a new one is sampled from
    the same ids."""
    REPLAYED = "replayed"
    """The earlier turn was finished but not delivered: it is returned now, and nothing is sampled."""


class Tolerated(enum.StrEnum):
    """A tolerated difference between the answer that a client received and the history that it sends."""

    REASONING_LEFT_OUT = "reasoning_left_out"
    """The reasoning of a turn is missing; the model still sees it."""
    REASONING_STRIPPED = "reasoning_stripped"
    """White space at the ends of a turn's reasoning differs."""
    REASONING_IN_CONTENT = "reasoning_in_content"
    """The reasoning of a turn is in its content, between `<think>` and `</think>` or similar marks."""
    REASONING_REWRITTEN = "reasoning_rewritten"
    """The reasoning of a turn has other words, but ids name the turn; the model still sees the sampled reasoning."""
    WHITE_SPACE = "white_space"
    """White space at the ends of a content differs."""
    TEXT_LEFT_OUT = "text_left_out"
    """The text of a turn is missing in part or completely, but ids name the turn; the model still sees it."""
    TEXT_REFORMATTED = "text_reformatted"
    """The text of a turn has other white space, punctuation or markup, but ids name the turn."""
    CALLS_LEFT_OUT = "calls_left_out"
    """Some calls of a turn are missing, but the ids of others name the turn."""
    CALLS_RENAMED = "calls_renamed"
    """A call names another tool, but has an id that names the turn, and the same arguments."""
    ARGUMENTS_CUT = "arguments_cut"
    """The arguments of a call are no longer a JSON object; if its id names a turn, that turn's arguments are used."""
    ARGUMENTS_RESPELT = "arguments_respelt"
    """The arguments of a call are the same value, written as other JSON."""
    CONTENT_NULL = "content_null"
    """A content is null instead of empty."""
    CONTENT_PARTS = "content_parts"
    """A content is a list of text parts."""
    CACHE_MARKS = "cache_marks"
    """Messages or parts have `cache_control`."""
    EXTRA_KEYS = "extra_keys"
    """Messages have extra keys that no template reads."""
    VOLATILE_LINES = "volatile_lines"
    """Lines of a system message differ between requests; they are removed."""
    JOINED = "joined"
    """One turn is sent as several messages, which are joined."""
    REORDERED = "reordered"
    """Results are in another order than the calls, or calls of one turn are in several messages with results between.
    """
    CALL_IDS = "call_ids"
    """Calls have other ids than in the answer; results are matched by position."""
    SYSTEM_JOINED = "system_joined"
    """Several system messages at the start are joined, for a template that accepts only one."""
    NOT_TEXT = "not_text"
    """Earlier content is not text, such as an image; a note replaces it."""
    REFERENCE = "reference"
    """A turn or a complete earlier response is named only by its id."""
    SYSTEM_AS_USER = "system_as_user"
    """System messages in mid-conversation are sent to the model as user messages, as the client requested."""
    CUT_ITEMS = "cut_items"
    """Complete parts of a cut turn are omitted."""


class Delivery(enum.StrEnum):
    """Progress of the answer to a request."""

    IN_FLIGHT = "in_flight"
    """The turn is being sampled."""
    DELIVERED = "delivered"
    """The client received the answer."""
    UNDELIVERED = "undelivered"
    """The answer was complete, but the client had disconnected."""
    CUT = "cut"
    """The client disconnected, or the episode ended, during sampling."""
    REFUSED = "refused"
    """The request got no answer: a limit was reached, or no prompt could be built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A client's request for one turn."""

    messages: Sequence[Any]
    """The complete history."""
    tools: Sequence[Any] = ()
    """Tools that may be called, in OpenAI's form."""
    sampling: Sampling | None = None
    """Sampling that the client requests; None if it requests none."""
    tool_choice: ToolChoice | None = None
    """"auto", "required", "none" or the name of a tool; None if the client requests none."""
    label: str = ""
    """The client's own name for the requesting agent; "" if it has none."""
    train: bool | None = None
    """True if a thread that begins with this request is trained; None trains the thread if it has tools."""
    handles: Sequence[str] = ()
    """Values by which the client names a turn, in addition to call ids."""
    previous: str = ""
    """Id of an earlier answer: the messages follow this answer and its history. "" if the messages are complete."""
    own_system: bool = False
    """True if the first message is a system message of this request only, not of requests that continue from it."""
    system_as_user: bool = False
    """True if system messages in mid-conversation are sent to the model as user messages."""
    as_sent: bool = False
    """True if the history is used as the client sent it, and rendered again at every request."""
    form: str = "messages"
    """API form of the request."""
    client: str = ""
    purpose: str = ""
    """Purpose of the request, in the client's own word."""
    not_granted: Mapping[str, Any] = field(default_factory=dict)
    """Requested settings that are not applied."""


@dataclass(slots=True, repr=False)
class ChatRequest:
    """Record of one request of `Episode.chat` or of an endpoint."""

    number: int
    """Number of the request in its episode, from 0."""
    verdict: Verdict
    """Relation of the request's history to the existing turns."""
    again: Again = Again.NO
    """Handling of the request if its prompt was already sent."""
    label: str = ""
    """The client's own name for the requesting agent, such as a session; "" if it has none."""
    form: str = "messages"
    """API form of the request."""
    client: str = ""
    """Name of the client program; "" if unknown."""
    purpose: str = ""
    """Purpose in the client's own word, such as `compaction`; "" if it sent none."""
    turn: int | None = None
    """Number of the turn that answered the request; None if nothing was sampled."""
    parent_agent: str = ""
    """Agent of the turn that the request continues; "" if it continues none."""
    parent_turn: int | None = None
    """Number of the turn that the request continues; None if it continues none."""
    tolerated: tuple[Tolerated, ...] = ()
    """Tolerated differences, by name."""
    volatile: int = 0
    """Number of lines that were removed from system messages."""
    not_granted: Mapping[str, Any] = field(default_factory=dict)
    """Requested sampling that is not applied."""
    messages: int = 0
    """Number of messages."""
    size: int = 0
    """Size of the messages as JSON, in bytes."""
    align_seconds: float = 0.0
    """Seconds for matching the history with the turns."""
    seconds: float = 0.0
    """Seconds from the arrival of the request to its answer, or to its refusal."""
    delivery: Delivery = Delivery.IN_FLIGHT
    """Progress of the answer."""
    error: str = ""
    """Reason for the refusal; "" if the request was not refused."""

    def __repr__(self) -> str:
        return f"<ChatRequest {self.number}: {self.verdict}, {self.delivery}>"
