"""Writes parts of answers that several wire forms share as JSON: texts, arguments of calls, log-probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from runner.endpoint.wire_form import TokenText
from runner.messages import canonical_json
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["arguments_text", "encode", "logprob_rows"]


def encode(value: Any) -> bytes:
    """Encode a value as JSON. Halves of surrogate pairs, which are not text, become question marks."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call as the text that clients receive and send back."""
    text = canonical_json(arguments)
    try:
        text.encode()
    except UnicodeEncodeError:  # a model may write half of a surrogate pair, which must come back unchanged
        return json.dumps(arguments, separators=(",", ":"), default=str)
    return text


def logprob_rows(
    text_of: TokenText,
    token_ids: Sequence[int],
    logprobs: Sequence[float] | None,
    top: TopLogprobs | None,
    *,
    count: int,
) -> list[dict[str, Any]]:
    """Return the log-probability of each id as OpenAI writes it, with the `count` most likely ids at its position."""
    rows = [] if top is None or not count else list(zip(top.id_rows(), top.logprob_rows(), strict=True))
    told = []
    for index, token_id in enumerate(token_ids):
        own = _token(text_of, token_id, 0.0 if logprobs is None else logprobs[index])
        likeliest = zip(*(each[:count] for each in rows[index]), strict=True) if index < len(rows) else ()
        own["top_logprobs"] = [_token(text_of, int(other), float(value)) for other, value in likeliest]
        told.append(own)
    return told


_MIN_LOGPROB: Final = -9999.0
"""Replaces minus infinity, which JSON lacks."""


def _token(text_of: TokenText, token_id: int, logprob: float) -> dict[str, Any]:
    text = text_of([token_id])
    logprob = logprob if math.isfinite(logprob) else _MIN_LOGPROB
    try:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
    except UnicodeEncodeError:  # a part of a character
        raw = text.encode("utf-8", "surrogateescape")
    # As OpenAI writes it: the joined bytes of several tokens are the text.
    token = "".join(f"\\x{ord(each) - 0xDC00:02x}" if each >= "\udc80" and each <= "\udcff" else each for each in text)
    return {"token": token, "logprob": logprob, "bytes": list(raw)}
