"""How a template ends a turn: the close, what stands behind it, and stops that open the next message."""

from __future__ import annotations

from collections.abc import Iterable

from runner.tokens.bridging.contents import common_length
from runner.tokens.bridging.prompts import PromptRenderer
from runner.tokens.control_text import special_tokens
from runner.tokens.probe_messages import (
    AGAIN,
    AGAIN_ASKED,
    ANSWER,
    ANSWERED,
    ASKED,
    CALL,
    QUESTION,
    RETURNED,
    VALUE,
    result,
)
from runner.tokens.probing.probe_renderer import ProbeRenderer

__all__ = ["close_after_call", "closes"]


def closes(probe: ProbeRenderer) -> tuple[str, str, str, tuple[str, ...]]:
    """The close once something follows, the one while nothing does, the separator, and openers that end a turn."""
    followed = probe.between(ANSWERED, AGAIN, QUESTION, ANSWER, AGAIN_ASKED, asking=True)
    alone = _without_opening(probe, probe.between(ANSWERED, "", QUESTION, ANSWER))
    opener = (probe.text(QUESTION) or "").partition(ASKED)[0]
    first = _first_special(followed)
    at_end = _through_last_special(alone)
    # Nothing of its own ends a turn, as in GLM's templates: a model stops with what opens the next message.
    if first and not special_tokens(alone) and opener.rstrip().endswith(_from(followed, first).rstrip()):
        openers = {first, *_opening_results(probe)}
        return "", at_end, "", tuple(sorted(openers))
    if at_end and followed.lstrip().startswith(at_end):
        close = at_end
    else:
        close = followed[: followed.index(first) + len(first)].strip() if first else ""
    return close, at_end or close, _separator(followed, close, alone, opener), ()


def _without_opening(probe: ProbeRenderer, alone: str) -> str:
    """What ends a turn, without what asks for the next one where the template always writes that."""
    if PromptRenderer(probe.renderer).generation_prompt:
        return alone
    opening = special_tokens(probe.between(ASKED, ANSWERED, QUESTION, ANSWER))
    cut = alone.rfind(opening[-1]) if opening else -1
    return alone if cut < 0 or special_tokens(alone)[-1] != opening[-1] else alone[:cut]


def _opening_results(probe: ProbeRenderer) -> Iterable[str]:
    tail = probe.between(VALUE, RETURNED, QUESTION, CALL, result(), asking=True)
    found = special_tokens(probe.between(VALUE, "", QUESTION, CALL))
    return [token for token in special_tokens(tail) if token not in found][:1]


def _separator(followed: str, close: str, alone: str, opener: str) -> str:
    """What stands behind the close and before what opens a message."""
    behind = followed.partition(close)[2] if close else followed
    left = alone.partition(close)[2] if close and close in alone else ""
    if left and not left.strip() and behind.startswith(left):
        return left
    shared = common_length(behind[::-1], opener[::-1])
    rest = behind[: len(behind) - shared]
    return rest if not special_tokens(rest) and rest.strip() == "" else ""


def close_after_call(probe: ProbeRenderer, at_end: str) -> str:
    alone = probe.between(VALUE, "", QUESTION, CALL)
    if at_end and alone.rstrip().endswith(at_end):
        return at_end
    tokens = special_tokens(alone)
    return tokens[-1] if tokens else ""


def _first_special(text: str) -> str:
    return next(iter(special_tokens(text)), "")


def _from(text: str, token: str) -> str:
    return text[text.index(token) :]


def _through_last_special(text: str) -> str:
    tokens = special_tokens(text)
    if not tokens:
        return text.strip()
    end = max(text.rindex(token) + len(token) for token in tokens)
    return text[:end].strip()
