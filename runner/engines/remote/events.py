"""Server-sent events: the data of each event from chunks of a byte stream."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["DONE", "EventReader"]

DONE = b"[DONE]"
"""Data of the last event of a stream."""

_MAX_LINE_BYTES = 64 << 20  # without the end of a line


class EventReader:
    """Parser that returns the data of events as their lines complete.

    Supported servers write one data line per event, so lines are not joined. Comments, which keep a connection alive,
    and other fields are skipped.
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of the events whose lines end in these bytes.

        Raises:
            ValueError: a line is too long.
        """
        *lines, self._open = (self._open + data).split(b"\n")
        if len(self._open) > _MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
