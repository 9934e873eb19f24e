"""Remote engine: whole episodes, log-probabilities, weight versions, adapters, header."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio

from envs.calculator import Calculator
from runner import BadWeights, Outcome, RequestRejected, Run, RunFile, Sampling, Task, ToolCall, Trajectory, WeightProof
from runner.engines.base import FinishReason
from runner.engines.remote.dialect import ServerDialect
from runner.engines.remote.engine import RemoteEngine
from runner.engines.remote.server_probe import served_models
from runner.engines.scripted.script import ModelCall
from runner.errors import BadControl, BadModel, BadOption
from runner.options import Constraint, ConstraintKind
from runner.testing import Latency, Reply, ScriptedEngine, assert_exact, call, play_async
from runner.tokens.top_logprobs import TopLogprobs
from runner.training import TrainingBatch
from tests.engines.remote.remote_requests import TEXT, asked, read, remote, serve, text_of, wanted
from tests.playing import Plain, tasks
from tests.verifying import verify

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

WATCHDOG_SECONDS = 600.0
DIALECTS = [pytest.param(dialect, id=dialect.value) for dialect in ServerDialect]
SLOW: dict[str, Any] = {"latency": Latency(between=1), "tick": 0.001}


def solve(asked: ModelCall) -> ToolCall:
    """Return the next call for the last question of the prompt, by the results in the prompt."""
    question = asked.prompt.rpartition("What is (")[2]
    first, second, third = re.findall(r"\d+", question.partition("?")[0])
    results = [int(number) for number in re.findall(r"tool\n(-?\d+)", question)]
    if not results:
        return call("add", a=int(first), b=int(second))
    return call("multiply", a=results[0], b=int(third)) if len(results) == 1 else call("answer", value=results[1])


# --- whole episodes


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_episode_by_way_of_a_server_is_the_one_on_its_engine(tmp_path: Path, dialect: ServerDialect) -> None:
    sampling = Sampling(logprobs=2)
    async with asked(tmp_path, solve, dialect=dialect) as (server, engine):
        far = await play_async(Calculator(), engine, sampling=sampling)
        near = await play_async(Calculator(), ScriptedEngine(solve, tokenizer=engine.tokenizer), sampling=sampling)
        assert len(server.bodies) == len(far.turns) == 3
    assert (far.reward, near.reward) == (1.2, 1.2)
    (theirs,), (ours,) = ([segment.log for segment in played.segments] for played in (far, near))
    assert (theirs.ids, theirs.sources) == (ours.ids, ours.sources)
    assert theirs.logprobs.tobytes() == ours.logprobs.tobytes()  # equal in every bit, NaN for ids that were not sampled
    assert {start: top.ids for start, top in theirs.top_logprobs.items()} == {
        start: top.ids for start, top in ours.top_logprobs.items()
    }
    assert [(turn.finish, turn.stop, turn.text) for turn in far.turns] == [
        (turn.finish, turn.stop, turn.text) for turn in near.turns
    ]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_run_by_way_of_a_server_is_verified_and_trained_on(tmp_path: Path, dialect: ServerDialect) -> None:
    file = tmp_path / "run.db"
    async with asked(tmp_path, solve, dialect=dialect) as (_, engine):
        played = await all_of(Run(Calculator(questions=4), engine, file=file, group_size=2))
        for trajectory in played:
            assert_exact(trajectory, engine)
    assert [(each.outcome, each.reward) for each in played] == [(Outcome.COMPLETED, 1.2)] * 8
    checked = verify(file, "--model", str(tmp_path / "model"))
    assert checked.exit_code == 0, checked.output
    batch = TrainingBatch.padded(played, pad_id=0)
    assert batch.trained == sum(turn.end - turn.start for each in played for turn in each.turns)
    with RunFile(file) as run_file:
        assert run_file.header.engine["kind"] == "remote"
        assert run_file.header.engine["dialect"] == dialect


async def all_of(run: Run) -> list[Trajectory]:
    async with run:
        return [trajectory async for trajectory in run]


async def test_run_resumes_its_file_at_another_server_address(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    for count in (2, 4):
        async with asked(tmp_path) as (server, engine):
            played = await all_of(Run(Plain(), engine, file=file, tasks=tasks(count)))
            assert len(played) == len(server.bodies) == 2


async def test_a_stop_string_ends_a_turn_here_and_closes_the_connection(tmp_path: Path) -> None:
    async with asked(tmp_path, **SLOW) as (server, engine):
        trajectory = await play_async(Plain(), engine, sampling=Sampling(stop=("answer",)))
        assert "stop" not in server.bodies[0]["sampling_params"]
        with anyio.fail_after(WATCHDOG_SECONDS):
            while server.open:  # noqa: ASYNC110  # the system reports the closed connection later
                await anyio.sleep(0.001)
    (turn,) = trajectory.turns
    assert (turn.finish, turn.stop, turn.text) == (FinishReason.STOP, "answer", "A long ")
    assert 0 < server.engine.runtime.sampled < len(TEXT)


# --- log-probabilities


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_most_likely_ids_have_the_requested_number(tmp_path: Path, dialect: ServerDialect) -> None:
    rows = [{70: -0.5, 71: -1.0, 72: -2.0, 73: -3.0}, {70: -0.1, 71: -4.0, 72: -math.inf, 73: -math.inf}]
    # The second sampled id is not among the most likely.
    reply = Reply(ids=[70, 80], logprobs=[-0.5, -6.0], top_logprobs=rows, finish="length")
    async with asked(tmp_path, reply, dialect=dialect) as (_, engine):
        deltas = await read(engine, wanted(2, logprobs=2))
    top = TopLogprobs(2)
    for delta in deltas:
        assert delta.top is not None
        top.extend(delta.top)
    assert top.id_rows().tolist() == [[70, 71], [70, 71]]
    assert top.logprob_rows().tolist() == [[-0.5, -1.0], [pytest.approx(-0.1), -4.0]]
    assert [logprob for delta in deltas for logprob in delta.logprobs or ()] == pytest.approx([-0.5, -6.0])


async def test_raw_logprobs_are_kept_only_for_unchanged_sampling(
    tmp_path: Path,
) -> None:
    grammar = Constraint(ConstraintKind.REGEX, ".*")
    async with asked(tmp_path, raw=True) as (_, engine):
        assert engine.describe()["logprobs"] == "raw_logprobs"

        async def given(**options: Any) -> bool:
            deltas = await read(engine, wanted(**options))
            assert text_of(deltas) == TEXT
            return all(delta.logprobs is not None for delta in deltas)

        for exact in ({}, {"temperature": 0.0}, {"stop_ids": (257, 66)}, {"seed": 3}):
            assert await given(**exact), exact
        for inexact in (
            {"temperature": 0.7},
            {"top_p": 0.9},
            {"top_k": 5},
            {"min_p": 0.1},
            {"min_tokens": 2},
            {"repetition_penalty": 1.1},
            {"presence_penalty": 1.0},
            {"frequency_penalty": 1.0},
            {"logit_bias": {65: 1.0}},
            {"bad_words": ("no",)},
            {"constraint": grammar},
        ):
            assert not await given(**inexact), inexact
        played = [await play_async(Plain(), engine, sampling=Sampling(temperature=0.7))]
    batch = TrainingBatch.padded(played, pad_id=0)
    assert not batch.exact
    assert "no finite log-probability from the engine" in batch.inexact_reason


async def test_processed_logprobs_are_kept_as_they_are(tmp_path: Path) -> None:
    async with asked(tmp_path) as (_, engine):
        assert engine.describe()["logprobs"] == "processed_logprobs"
        deltas = await read(engine, wanted(temperature=0.7, top_p=0.9))
        assert all(delta.logprobs is not None for delta in deltas)


# --- weight versions


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_new_weights_of_a_server_are_seen_by_what_it_samples(tmp_path: Path, dialect: str) -> None:
    versions: list[str] = []
    async with asked(tmp_path, dialect=ServerDialect(dialect)) as (server, engine):
        with engine.on_update(lambda: versions.append(engine.weight_version)):
            assert engine.weight_version == "scripted"
            await server.engine.update_weights("new", version="7")
            stream = engine.stream(wanted())
            async with stream:
                assert text_of([delta async for delta in stream]) == TEXT
    assert stream.finish is not None
    assert [span.version for span in stream.finish.versions] == ["7"]
    assert engine.weight_version == "7"
    assert (engine.lag("scripted"), engine.lag("7")) == (1, 0)
    assert versions == ["7"]


async def test_weight_change_during_a_turn_splits_its_version_spans(tmp_path: Path) -> None:
    async with asked(tmp_path, **SLOW) as (server, engine):
        stream = engine.stream(wanted())
        async with stream:
            await anext(stream)
            await server.engine.update_weights("new", version="7")
            _ = [delta async for delta in stream]
    assert stream.finish is not None
    first, second = stream.finish.versions
    assert (first.version, second.version) == ("scripted", "7")
    assert 0 < first.end == second.start < second.end == len(TEXT) + 1


async def test_cut_turn_has_the_last_reported_version(tmp_path: Path) -> None:
    async with asked(tmp_path, **SLOW) as (_, engine):
        stream = engine.stream(wanted())
        async with stream:
            await anext(stream)
    assert stream.finish is not None
    assert {span.version for span in stream.finish.versions} == {"scripted"}


# --- adapters


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_adapter_that_the_server_lists_is_asked_for_by_its_name(
    tmp_path: Path, dialect: ServerDialect
) -> None:
    async with asked(tmp_path, adapters=("poet",), dialect=dialect) as (server, engine):
        assert list(engine.adapters) == ["poet"]
        stream = engine.stream(wanted(adapter="poet"))
        async with stream:
            _ = [delta async for delta in stream]
        assert server.bodies[-1]["lora_path" if dialect is ServerDialect.SGLANG else "model"] == "poet"
        assert stream.finish is not None
        assert [span.version.partition("+")[2] for span in stream.finish.versions] == ["poet@1"]
        with pytest.raises(RequestRejected, match="no adapter 'painter'; it has 'poet'"):
            await read(engine, wanted(adapter="painter"))


# --- missing features of a server


async def test_server_without_control_calls_refuses_with_the_fix(tmp_path: Path) -> None:
    async with asked(tmp_path, developed=False) as (_, engine):
        assert engine.places == 128
        for control in (engine.pause, engine.sleep):
            with pytest.raises(BadControl, match="VLLM_SERVER_DEV_MODE=1"):
                await control()
        with pytest.raises(BadControl, match="VLLM_SERVER_DEV_MODE=1"):
            await engine.reset_prefix_cache()
        with pytest.raises(BadControl, match="profile a VllmEngine"):
            await engine.start_profile()
        assert text_of(await read(engine)) == TEXT


@pytest.mark.parametrize(
    ("developed", "said"), [(True, r"cannot release the memory .* dialect='sglang'"), (False, "from 0.5.8 on")]
)
async def test_sleep_on_sglang_is_refused_with_what_helps(tmp_path: Path, developed: bool, said: str) -> None:
    async with asked(tmp_path, dialect=ServerDialect.SGLANG, developed=developed) as (_, engine):
        with pytest.raises(BadControl, match=said):
            await engine.sleep()


async def test_control_call_without_the_rights_is_refused_with_the_key(tmp_path: Path) -> None:
    async with asked(tmp_path) as (server, engine):
        server.reset_status = 403
        with pytest.raises(
            BadControl, match=r"/reset_prefix_cache.* answered 403: refused: give a key with the rights"
        ):
            await engine.reset_prefix_cache()
        server.reset_status = 404
        with pytest.raises(BadControl, match=r"answered 404: refused: start it .* VLLM_SERVER_DEV_MODE=1"):
            await engine.reset_prefix_cache()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bad_words": ("no",)}, "bad_words"),
        ({"ignore_eos": True, "stop_ids": (66,)}, "ignore_eos"),
        ({"extra": {"force": [1]}}, r"extra arguments \(force\)"),
    ],
)
async def test_option_unsupported_by_sglang_is_refused_before_sending(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    async with asked(tmp_path, dialect=ServerDialect.SGLANG) as (server, engine):
        with pytest.raises(RequestRejected, match=said):
            await read(engine, wanted(**options))
        assert server.bodies == []


def test_an_engine_on_trio_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(BadOption, match="asyncio alone"):
            await RemoteEngine("http://127.0.0.1:1").__aenter__()

    trio.run(main)


# --- sizes and header


async def test_places_are_those_of_the_server_unless_they_are_given(tmp_path: Path) -> None:
    async with serve(tmp_path, places=5) as server:
        async with remote(server, tmp_path) as engine:
            assert engine.places == 5
        async with remote(server, tmp_path, places=3) as engine:
            assert engine.places == 3
            assert engine.context == server.engine.context


async def test_the_key_stands_in_no_header(tmp_path: Path) -> None:
    async with asked(tmp_path, key="very secret", engine={"api_key": "very secret"}) as (_, engine):
        assert "very secret" not in repr(engine.describe())
        assert "very secret" not in repr(vars(engine.runtime))


async def test_an_engine_that_was_left_can_be_entered_again(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        engine = remote(server, tmp_path)
        for _ in range(2):
            async with engine:
                assert text_of(await read(engine)) == TEXT
            assert not engine.is_alive()


async def test_the_connection_of_a_turn_that_ended_is_used_again(tmp_path: Path) -> None:
    ports: list[Any] = []

    async def seen(request: Any) -> None:
        ports.append(request.transport.get_extra_info("peername"))

    async with asked(tmp_path, troubles=[seen] * 4) as (_, engine):
        for _ in range(4):
            await read(engine)
    assert len(set(ports)) == 1


async def test_one_of_several_models_is_chosen_by_the_folder_name(tmp_path: Path) -> None:
    async with serve(tmp_path, others=("other",)) as server:
        with pytest.raises(BadModel, match=r"has several models: scripted, other. Choose one with name="):
            await remote(server, tmp_path).__aenter__()
        (tmp_path / "model").rename(tmp_path / "scripted")
        async with RemoteEngine(server.url, tmp_path / "scripted") as engine:
            assert engine.describe()["served_as"] == "scripted"


async def test_run_on_a_server_is_as_wide_as_its_places(tmp_path: Path) -> None:
    async with asked(tmp_path, places=3, **SLOW) as (server, engine):
        played = await all_of(Run(Plain(), engine, tasks=[Task(id=str(n), prompt="?") for n in range(12)]))
        assert len(played) == 12
        assert server.most_open == 3


def test_adapter_belongs_to_its_model_under_every_name() -> None:
    cards = [("one", "/model", None), ("two", "/model", None), ("other", "/other", None), ("poet", "/lora", "one")]
    models = served_models({"data": [{"id": name, "root": root, "parent": parent} for name, root, parent in cards]})
    assert {model.name: model.adapters for model in models} == {"one": ("poet",), "two": ("poet",), "other": ()}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_weights_of_a_server_are_proven_by_prove(tmp_path: Path, dialect: ServerDialect) -> None:
    """A server does not report its number type, so its first proof measures the tolerance."""
    offset, ids = 0.0, list(range(3, 43))

    def logprobs(given: Any, rounding: float = 0.0) -> list[float]:
        return [-2.0 - offset - rounding - each / 100 for each in given[1:]]

    async with asked(tmp_path, "Yes", dialect=dialect, scores=logprobs) as (_, engine):
        await engine.prove(WeightProof(ids, logprobs(ids, 0.02), dtype="bfloat16"))
        offset = 0.5
        right = await engine.prove(WeightProof(ids, logprobs(ids, 0.04), dtype="bfloat16"))
        assert right.tolerance.median == pytest.approx(0.06)
        proof, offset = WeightProof(ids, logprobs(ids), dtype="bfloat16"), 0.4
        with pytest.raises(BadWeights, match=r"median difference 0\.1 nats \(at most 0\.06\)"):
            await engine.prove(proof)
