"""Refusals of requests: a reason with its status and code, and a message.

Each wire form has its own body for refusals.
"""

from __future__ import annotations

import enum
from http import HTTPStatus

from runner.chat_requests import UnknownReference
from runner.errors import BadInput, ContextFull, EpisodeOver

__all__ = ["Reason", "Refused", "ended", "refusal_of"]


class Reason(enum.StrEnum):
    """The reason of a refusal."""

    INVALID = "invalid_request"
    """A field cannot be used; do not retry."""
    OVERFLOW = "context_length_exceeded"
    """The history does not fit the model's context, but a shorter one may."""
    OVER = "episode_over"
    """The episode has ended or reached a limit; do not retry."""
    UNAUTHORIZED = "invalid_api_key"
    """The key belongs to no episode."""
    NO_REWARD = "reward_not_allowed"
    """A reward arrived with the key of the program that is rewarded."""
    FORBIDDEN = "forbidden_host"
    """The Host header is not an address of this endpoint."""
    NOT_FOUND = "not_found"
    """This address does not exist."""
    METHOD = "method_not_allowed"
    """The address exists, but for another HTTP method."""
    TOO_LARGE = "request_too_large"
    """The body is too large."""
    SLOW = "request_timeout"
    """The body did not arrive in time."""
    BUSY = "rate_limit_exceeded"
    """Too many requests of this episode are in flight; retry later."""
    NO_ITEM = "item_not_found"
    """An item id was not returned by this episode."""
    NO_RESPONSE = "previous_response_not_found"
    """A response id was not returned by this episode."""
    FAILED = "server_error"
    """An internal error."""

    @property
    def status(self) -> HTTPStatus:
        """HTTP status of the answer. It is never 409, which all clients retry."""
        return _STATUS.get(self, HTTPStatus.BAD_REQUEST)

    @property
    def retry(self) -> bool:
        """True if the same request may succeed later."""
        return self in (Reason.BUSY, Reason.FAILED, Reason.SLOW)


_STATUS = {
    Reason.UNAUTHORIZED: HTTPStatus.UNAUTHORIZED,
    Reason.NO_REWARD: HTTPStatus.FORBIDDEN,
    Reason.FORBIDDEN: HTTPStatus.MISDIRECTED_REQUEST,
    Reason.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Reason.NO_ITEM: HTTPStatus.NOT_FOUND,
    Reason.METHOD: HTTPStatus.METHOD_NOT_ALLOWED,
    Reason.TOO_LARGE: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    Reason.SLOW: HTTPStatus.REQUEST_TIMEOUT,
    Reason.BUSY: HTTPStatus.TOO_MANY_REQUESTS,
    Reason.FAILED: HTTPStatus.INTERNAL_SERVER_ERROR,
}


class Refused(Exception):
    """The refusal of a request.

    Args:
        reason: the reason.
        message: a sentence that names the cause and the fix.
        prompt: number of ids of a prompt that does not fit, for `OVERFLOW`.
        context: maximum context of the model, in ids, for `OVERFLOW`.
        code: the code for Anthropic's clients.
    """

    def __init__(self, reason: Reason, message: str, *, prompt: int = 0, context: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.prompt = prompt
        self.context = context
        self.code = code


def ended() -> Refused:
    """Return the refusal of requests to an episode that is over."""
    return Refused(Reason.OVER, "the episode has ended: send no more requests with this API key.")


def refusal_of(error: Exception) -> Refused:
    """Return the refusal for an error. It has the error's text, or a general text if the error is an internal one."""
    match error:
        case Refused():
            return error
        case ContextFull():
            return Refused(Reason.OVERFLOW, str(error), prompt=error.prompt, context=error.context)
        case EpisodeOver():
            return Refused(Reason.OVER, f"the episode is over: {error}")
        case UnknownReference():
            return Refused(Reason.NO_ITEM if error.is_item else Reason.NO_RESPONSE, str(error))
        case BadInput():
            return Refused(Reason.INVALID, str(error))
        case RecursionError():
            return Refused(Reason.INVALID, "something in the body is nested too deeply: send it as text.")
    return Refused(Reason.FAILED, "the request failed; the output of the run has the reason")
