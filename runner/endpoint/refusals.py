"""Why a request gets no answer: the status, a code, and one sentence. Each wire form writes it in its own words."""

from __future__ import annotations

import enum
from http import HTTPStatus

from runner.chat_requests import UnknownReference
from runner.errors import BadInput, ContextFull, EpisodeOver

__all__ = ["Reason", "Refused", "ended", "refusal_of"]


class Reason(enum.StrEnum):
    """Why a request is refused."""

    INVALID = "invalid_request"
    """Something in it cannot be used; asking again is in vain."""
    OVERFLOW = "context_length_exceeded"
    """Its history does not fit the model's context; a shorter one may."""
    OVER = "episode_over"
    """The episode has ended or reached a limit; asking again is in vain."""
    UNAUTHORIZED = "invalid_api_key"
    """Its key is that of no episode."""
    NO_REWARD = "reward_not_allowed"
    """It says a reward with the key of the program that is rewarded."""
    FORBIDDEN = "forbidden_host"
    """It was sent to another host's name."""
    NOT_FOUND = "not_found"
    """There is nothing at this address."""
    METHOD = "method_not_allowed"
    """There is something, for another method."""
    TOO_LARGE = "request_too_large"
    """Its body is larger than the endpoint reads."""
    SLOW = "request_timeout"
    """Its body did not come in time."""
    BUSY = "rate_limit_exceeded"
    """Too many requests of this episode are in flight; asking again later helps."""
    NO_ITEM = "item_not_found"
    """It names an item that this episode did not give out."""
    NO_RESPONSE = "previous_response_not_found"
    """It goes on from a response that this episode did not give out."""
    FAILED = "server_error"
    """Something of ours failed."""

    @property
    def status(self) -> HTTPStatus:
        """The status of the answer. None of them is 409, which every client tries again."""
        return _STATUS.get(self, HTTPStatus.BAD_REQUEST)

    @property
    def retry(self) -> bool:
        """Whether asking the same again may help."""
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
    """A request gets no answer.

    Args:
        reason: why.
        message: the same in a sentence that names the thing and the fix.
        prompt: how many ids the prompt has that does not fit, where that is the reason.
        context: how many the model can have.
        code: the word by which Anthropic's clients know it.
    """

    def __init__(self, reason: Reason, message: str, *, prompt: int = 0, context: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.prompt = prompt
        self.context = context
        self.code = code


def ended() -> Refused:
    """What a client is told whose episode is served no more."""
    return Refused(Reason.OVER, "the episode is over: it has ended.")


def refusal_of(error: Exception) -> Refused:
    """What a client is told of an error: all of ours, and nothing of what failed inside."""
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
    return Refused(Reason.FAILED, "the request failed; the run's own output says why")
