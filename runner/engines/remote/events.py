"""Server-sent events: the data of each out of the bytes of a stream, however these are cut."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["DONE", "EventReader"]

DONE = b"[DONE]"
"""The data of the last event of a stream."""

_MAX_LINE_BYTES = 64 << 20  # bytes without the end of a line


class EventReader:
    """Gives the data of events as their lines are complete.

    All servers that are asked write one line of data an event, so the lines are not joined. Comments, which keep a
    connection alive, and other fields are skipped.
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of the events whose lines end in these bytes.

        Raises:
            ValueError: the line has no end.
        """
        *lines, self._open = (self._open + data).split(b"\n")
        if len(self._open) > _MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
