"""Server-sent events from bytes, in any division."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.engines.remote import stream
from runner.engines.remote.stream import EventReader

STREAM = b': keep-alive\r\n\r\nid: 7\ndata: {"a": "\xc3\xa9"}\n\ndata:{"b":1}\r\n\r\n\ndata: [DONE]\n\n'
SAID = [b'{"a": "\xc3\xa9"}', b'{"b":1}', b"[DONE]"]


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_however_their_bytes_are_cut(cuts: list[int]) -> None:
    reader, edges = EventReader(), [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in pairwise(edges)]
    assert [event for piece in pieces for event in reader.feed(piece)] == SAID


def test_a_line_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MAX_LINE_BYTES", 100)
    with pytest.raises(ValueError, match="line of more than 100 bytes"):
        list(EventReader().feed(b"data: " + b"x" * 100))
