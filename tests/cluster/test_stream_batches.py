"""Deltas of streams arrive unchanged: every id, every bit of a log-probability, in the order of each stream."""

from __future__ import annotations

import pickle
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.cluster.engine_host import Deltas, Ended, StreamBuffer, StreamEvent, each_of
from runner.engines.base import Delta, Finish, FinishReason
from runner.errors import EngineDead
from runner.tokens.side_data import RoutedExperts, SamplingMasks, SideData
from runner.tokens.top_logprobs import TopLogprobs

ids = st.integers(0, 2**31 - 1)
logprobs = st.floats(max_value=0.0, allow_nan=False)
sampled = st.lists(st.tuples(ids, logprobs), max_size=4)


def delta(sampled: list[tuple[int, float]], *, with_logprobs: bool, finish: Finish | None) -> Delta:
    return Delta(
        [token_id for token_id, _ in sampled], [logprob for _, logprob in sampled] if with_logprobs else None, finish
    )


deltas = st.builds(
    delta, sampled, with_logprobs=st.booleans(), finish=st.none() | st.just(Finish(FinishReason.STOP, stop=7))
)
event: st.SearchStrategy[StreamEvent] = st.none() | deltas | st.builds(Ended, st.lists(deltas, max_size=2), st.none())


@given(st.lists(st.tuples(st.integers(0, 2**62), event)))
def test_stream_events_arrive_in_order_and_bit_for_bit(said: list[tuple[int, StreamEvent]]) -> None:
    buffer = StreamBuffer()
    for number, each in said:
        buffer.put(number, each)
    assert bool(buffer) == bool(said)
    assert list(each_of(pickle.loads(pickle.dumps(buffer.take())))) == said
    assert buffer.take() == []


def test_consecutive_deltas_of_all_streams_go_as_one_object() -> None:
    buffer = StreamBuffer()
    for number in range(100):
        buffer.put(number, Delta([number, number], [-0.5, -1.5]))
    (only,) = buffer.take()
    assert isinstance(only, Deltas)
    assert list(only) == [(number, Delta([number, number], [-0.5, -1.5])) for number in range(100)]


@pytest.mark.parametrize(
    "said",
    [
        Delta([1], [-0.1], top=TopLogprobs.of([{1: -0.1, 2: -3.0}], 2)),
        Delta([1], [-0.1], Finish(FinishReason.LENGTH)),
        Delta([1], None),
    ],
)
def test_delta_that_is_not_just_ids_and_logprobs_is_not_merged(said: StreamEvent) -> None:
    buffer = StreamBuffer()
    buffer.put(1, Delta([5], [-2.0]))
    buffer.put(1, said)
    buffer.put(1, Delta([6], [-2.5]))
    taken = buffer.take()
    assert len(taken) == 3
    assert list(each_of(taken)) == [(1, Delta([5], [-2.0])), (1, said), (1, Delta([6], [-2.5]))]


def test_a_failure_keeps_its_place() -> None:
    buffer = StreamBuffer()
    failure = EngineDead("it died")
    buffer.put(1, Delta([5], [-2.0]))
    buffer.put(1, failure)
    assert [each for _, each in each_of(buffer.take())][1] is failure


def test_side_data_arrives_with_its_delta() -> None:
    side = SideData(SamplingMasks.of([[7, 8], [9]]), RoutedExperts(0, 1, 2, array("h", [1, 2, 3, 4])))
    said: list[tuple[int, StreamEvent]] = [(1, Delta([7, 9], [-0.5, -0.25], side=side)), (1, Delta([4], [-1.0]))]
    buffer = StreamBuffer()
    for number, each in said:
        buffer.put(number, each)
    assert list(each_of(pickle.loads(pickle.dumps(buffer.take())))) == said
