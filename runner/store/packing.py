"""Conversion of token logs to the bytes and spans of a run file, and back."""

from __future__ import annotations

import math
import re
import sys
from array import array
from collections.abc import Iterator
from typing import Any

from runner.tokens.log import Source, TokenLog

__all__ = ["pack", "packed_logprobs", "source_spans", "sources_of", "unpack", "unpacked_logprobs"]


def pack(values: array[Any]) -> bytes:
    """Return the values as bytes, one after the other, little-endian on every machine."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def unpack(typecode: str, data: bytes) -> array[Any]:
    """Return the array that `pack` packed; `typecode` is its type code."""
    values: array[Any] = array(typecode)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


# A regular expression finds runs of equal bytes in C; a loop over the ids would cost more than the rest of a commit.
_SAME = re.compile(rb"(?s)(.)\1*")


def source_spans(sources: array[int]) -> Iterator[tuple[int, int]]:
    """Yield (source, length) for each sequence of adjacent ids from the same source, in order."""
    for run in _SAME.finditer(sources.tobytes()):
        yield run[0][0], run.end() - run.start()


def sources_of(spans: list[tuple[int, int]]) -> array[int]:
    """The source of every id, shape [length], int8, from the spans of `source_spans`."""
    sources = array("b")
    for source, length in spans:
        sources.extend(array("b", [source]) * length)
    return sources


def _sampled_slices(sources: array[int]) -> Iterator[slice]:
    start = 0
    for source, length in source_spans(sources):
        if source in (Source.SAMPLED, Source.RETRIED):
            yield slice(start, start + length)
        start += length


_NAN = array("f", [math.nan])


def packed_logprobs(log: TokenLog) -> bytes | None:
    """The log-probabilities of the sampled ids as bytes of float32; None if no id was sampled, or all are NaN."""
    sampled = array("f")
    for part in _sampled_slices(log.sources):
        sampled.extend(log.logprobs[part])
    data = pack(sampled)
    return None if data == pack(_NAN * len(sampled)) else data


def unpacked_logprobs(data: bytes | None, sources: array[int], segment: int) -> array[float]:
    """A log-probability for every id of a segment, shape [length], float32.

    The values are NaN for ids that were not sampled, and for all ids if `data` is None.

    Raises:
        ValueError: the number of log-probabilities differs from the number of sampled ids.
    """
    logprobs = _NAN * len(sources)
    if data is None:
        return logprobs
    sampled, parts = unpack("f", data), list(_sampled_slices(sources))
    ids = sum(part.stop - part.start for part in parts)
    if len(sampled) != ids:
        raise ValueError(f"segment {segment} has {len(sampled)} log-probabilities for {ids} sampled ids")
    taken = 0
    for part in parts:
        length = part.stop - part.start
        logprobs[part] = sampled[taken : taken + length]
        taken += length
    return logprobs
