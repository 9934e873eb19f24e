"""Observers of other libraries: the data that OpenTelemetry's own SDK receives, and libraries that are missing or fail.

tests/interop/test_observers.py plays with trackio and Weights & Biases.
"""

from __future__ import annotations

import sys
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from runner import BadEnvironment, Environment, Run, RunObserver
from runner.trainers.observers import OpenTelemetryObserver, TrackioObserver, WandbObserver
from tests.playing import Plain, play_all, recording, talking, tasks, twice

pytestmark = pytest.mark.anyio


def telemetry() -> tuple[OpenTelemetryObserver, InMemorySpanExporter, InMemoryMetricReader]:
    spans, numbers = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    return OpenTelemetryObserver(tracers, MeterProvider([numbers])), spans, numbers


def points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    assert data is not None
    found = [each for of in data.resource_metrics for scope in of.scope_metrics for each in scope.metrics]
    return {each.name: list(each.data.data_points) for each in found}


async def test_each_episode_is_a_span_with_a_span_for_each_turn() -> None:
    observer, spans, _ = telemetry()
    played = await play_all(talking(twice), recording("Yes"), tasks=tasks(2), group_size=2, observers=[observer])
    finished = spans.get_finished_spans()
    episodes = {each.context.span_id: each for each in finished if each.name == "episode"}
    calls = [each for each in finished if each.name == "chat"]
    assert (len(episodes), len(calls)) == (4, 8)
    for trajectory in played:
        (span,) = [
            each for each in episodes.values() if (each.attributes or {})["deltarunner.episode"] == trajectory.id
        ]
        given = span.attributes or {}
        assert (given["deltarunner.reward"], given["deltarunner.outcome"]) == (1.0, "completed")
        assert given["deltarunner.group_size"] == 2
        own = [each for each in calls if each.parent is not None and each.parent.span_id == span.context.span_id]
        counts = [(each.attributes or {})["gen_ai.usage.output_tokens"] for each in own]
        assert counts == [turn.tokens for turn in trajectory.turns]
        times = [time for each in own for time in (each.start_time or 0, each.end_time or 0)]
        assert times == sorted(times)
        assert abs((span.end_time or 0) - (span.start_time or 0) - trajectory.seconds * 1e9) < 2e6


async def test_episodes_tokens_rewards_and_weights_are_counted() -> None:
    updated = anyio.Event()

    class PlaysAfterTheUpdate(Plain):
        async def setup(self) -> None:
            await updated.wait()

    observer, _, numbers = telemetry()
    engine = recording("Yes")
    async with Run(PlaysAfterTheUpdate, engine, tasks=tasks(3), observers=[observer]) as run:
        await engine.update_weights({})
        updated.set()
        tokens = [trajectory.sampled async for trajectory in run]
    found = points(numbers)
    assert [(each.attributes, each.value) for each in found["deltarunner.episodes"]] == [({"outcome": "completed"}, 3)]
    assert found["deltarunner.tokens"][0].value == 3 * tokens[0]
    assert (found["deltarunner.reward"][0].count, found["deltarunner.reward"][0].sum) == (3, 3.0)
    assert found["deltarunner.weight_updates"][0].value == 1
    assert not run.summary.faults


async def test_failed_episode_has_a_span_without_a_reward() -> None:
    class Fails(Plain):
        def setup(self) -> None:
            raise OSError("no disk")

    observer, spans, _ = telemetry()
    environment: type[Environment[Any]] = Fails
    await play_all(environment, recording("Yes"), tasks=tasks(1), breaker=1, observers=[observer])
    (span,) = spans.get_finished_spans()
    given = span.attributes or {}
    assert given["deltarunner.outcome"] == "env_error"
    assert "deltarunner.reward" not in given


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (OpenTelemetryObserver, "opentelemetry.trace", "opentelemetry"),
        (TrackioObserver, "trackio", "trackio"),
        (WandbObserver, "wandb", "wandb"),
    ],
)
def test_missing_library_is_named_with_its_extra(
    make: type[RunObserver], module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadEnvironment, match=rf"pip install 'deltarunner\[{extra}\]'"):
        make()


async def test_library_that_does_not_start_is_one_fault() -> None:
    class Offline:
        @staticmethod
        def init(**_: Any) -> None:
            raise ConnectionError("no network")

    observer = TrackioObserver.__new__(TrackioObserver)
    super(TrackioObserver, observer).__init__()
    # a stand-in for its module
    observer._trackio, observer._options, observer._run = Offline, {}, None  # type: ignore[assignment]
    async with Run(Plain, recording("Yes"), tasks=tasks(3), observers=[observer]) as run:
        assert [trajectory.reward async for trajectory in run] == [1.0] * 3
    (fault,) = run.summary.faults
    assert fault.startswith("observer TrackioObserver raised 1 time, first: ConnectionError: no network")
