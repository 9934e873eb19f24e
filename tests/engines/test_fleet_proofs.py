"""Proofs of weights on the workers of a fleet: a worker with other results does not play."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from runner import BadControl, BadOption, BadWeights, EngineDead, WeightProof
from runner.engines.state import CheckedUpdate, WeightUpdate
from tests.cluster.in_process import InProcessWorker
from tests.cluster.playing import WATCHDOG_SECONDS, dice_engine, fleet
from tests.cluster.sending import KINDS
from tests.engines.test_proofs import IDS, Model
from tests.playing import until

pytestmark = [pytest.mark.anyio, pytest.mark.sample_functions(2)]


async def test_fleet_proves_after_its_caches_are_awake() -> None:
    async with fleet(3, dice_engine(scores=Model())) as (engine, launcher), engine:
        figures = list[Any]()
        with engine.on_update(lambda: figures.append(engine.proof_figures)):
            await engine.sleep()
            await engine.wake(["weights"])
            odd, kept = launcher.workers[1].worker.engine, Model()
            kept.offset = 0.5
            object.__setattr__(odd._planner, "scores", kept)
            update = await engine.update_weights("new", proof=Model().proof())
            assert (update.proof, figures) == (None, [])
            await engine.wake(["kv_cache"])
        assert engine.proof_figures is not None
        assert (engine.proof_figures.median, figures) == (0.0, [engine.proof_figures])
        await until(lambda: launcher.workers[1] not in launcher.alive)
        (lost,) = [event for event in engine.events if "the proof of the weights" in event]
        assert "worker 1" in lost


async def test_quantized_fleet_needs_the_proof_of_its_first_weights() -> None:
    async with fleet(2, dice_engine(scores=Model())) as (engine, launcher), engine:
        for worker in launcher.workers.values():
            worker.worker.engine.runtime.proofs.quantization = "weights in fp8"
        with pytest.raises(BadControl, match="computes with weights in fp8"):
            await engine.update_weights("new", proof=Model().proof())
        await engine.prove(Model().proof())
        await engine.update_weights("new", proof=Model().proof())
        assert len(launcher.alive) == 2


async def test_a_worker_that_keeps_its_old_weights_is_dismissed_by_name() -> None:
    async with fleet(3, dice_engine(scores=Model())) as (engine, launcher), engine:
        await engine.prove(Model().proof())
        odd = launcher.workers[1].worker.engine
        kept = Model()
        kept.offset = 0.5
        object.__setattr__(odd._planner, "scores", kept)
        update = await engine.update_weights("new", proof=Model().proof())
        assert update.proof is not None
        assert update.proof.median == 0.0
        await until(lambda: len(engine.workers()) == 3 and {each.version for each in engine.workers()} == {"1"})
        assert launcher.workers[1] not in launcher.alive
        (lost,) = [event for event in engine.events if "the proof of the weights" in event]
        assert "worker 1" in lost
        assert "does not hold" in lost


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("kind", ["folder", *KINDS])
async def test_fleet_ends_if_no_worker_passes_the_proof(kind: str) -> None:
    """New workers would get the same weights, and fail the same proof."""
    given = KINDS[kind]() if kind in KINDS else "new"
    other = WeightProof(IDS, [each - 1.0 for each in Model()(IDS)])
    async with fleet(2, dice_engine(scores=Model())) as (engine, launcher), engine:
        with pytest.raises(EngineDead, match="the proof of the weights '1' does not hold"):
            await engine.update_weights(given, proof=other)
        assert not engine.is_alive()
        await until(lambda: not launcher.alive)
        with pytest.raises(EngineDead, match=r"no worker has the weights '1': .* or the proof is of other weights"):
            await engine.health()
        assert len(launcher.workers) == 2, "no worker is started again"


async def test_fleet_reports_weights_that_change_no_score(caplog: pytest.LogCaptureFixture) -> None:
    moved, unmoved = (WeightUpdate("2", 0.0, 0.0, 0.0, moved=each) for each in (True, False))
    async with fleet(2, dice_engine()) as (engine, _), engine:
        runtime: Any = engine.runtime
        runtime._noted(CheckedUpdate("2", 0.0, "folder"), [moved, moved])
        assert not caplog.records
        assert runtime._noted(CheckedUpdate("2", 0.0, "folder"), [moved, unmoved]).moved is False
    assert "the weights '2' change no score on a worker" in caplog.text


async def test_fleet_scores_ids_on_a_worker() -> None:
    model = Model()
    async with fleet(2, dice_engine(scores=model)) as (engine, launcher), engine:
        assert await engine.score(IDS) == pytest.approx(model(IDS))
        assert await engine.score(IDS, start=30) == pytest.approx(model(IDS)[29:])
        with pytest.raises(BadOption, match="give two or more"):
            await engine.score([3])
        assert len(engine.workers()) == 2, "a refusal ends no worker"
        launcher.workers[0].kill()
        assert await engine.score(IDS) == pytest.approx(model(IDS))


async def test_a_worker_that_joins_later_has_to_pass_the_proof_too() -> None:
    def plant(worker: InProcessWorker) -> None:
        """Let the first worker that joins compute other results."""
        launcher.on_start = lambda _: None
        object.__setattr__(worker.worker.engine._planner, "scores", lambda ids: [-9.0] * (len(ids) - 1))

    async with fleet(2, dice_engine(scores=Model())) as (engine, launcher), engine:
        await engine.update_weights("new", proof=Model().proof())
        launcher.on_start = plant
        launcher.workers[0].kill()
        await until(lambda: [each.number for each in engine.workers()] == [1, 3])
        assert any("worker 2" in event and "the proof of the weights" in event for event in engine.events)
        assert {each.version for each in engine.workers()} == {"1"}


@pytest.mark.parametrize("updates", [pytest.param(False, marks=pytest.mark.whole), True])
async def test_worker_that_joins_later_has_the_first_proof(updates: bool) -> None:
    """The worker's tolerance follows from its own first weights, as for the other workers."""
    model, noise = Model(), [0.02, -0.02]
    noisy = WeightProof(IDS, [each + noise[n % 2] for n, each in enumerate(model(IDS))], dtype="bfloat16")
    async with fleet(2, dice_engine(scores=model)) as (engine, launcher), engine:
        await engine.prove(noisy)
        if updates:
            await engine.update_weights("new", proof=noisy)
        launcher.workers[0].kill()
        await until(lambda: [each.number for each in engine.workers()] == [1, 2])
        for number in (1, 2):
            update = await launcher.workers[number].worker.engine.update_weights("newer", proof=noisy)
            assert update.proof is not None
            assert update.proof.tolerance.median == pytest.approx(0.06)


async def test_proof_of_a_paused_fleet_waits_until_it_is_resumed() -> None:
    proven = list[Any]()

    async def prove(engine: Any) -> None:
        proven.append(await engine.prove(Model().proof()))

    async with fleet(2, dice_engine(scores=Model())) as (engine, launcher), engine:
        await engine.pause()
        async with anyio.create_task_group() as group:
            group.start_soon(prove, engine)
            await until(lambda: all("prove" in str(worker.calls) for worker in launcher.alive))
            assert not proven
            with anyio.fail_after(WATCHDOG_SECONDS):
                await engine.resume()
        assert [each.median for each in proven] == [0.0]


async def test_wrong_first_proof_is_not_asked_of_later_workers() -> None:
    async with fleet(2, dice_engine(scores=Model())) as (engine, launcher), engine:
        wrong = WeightProof(IDS, [each - 1.0 for each in Model()(IDS)])
        with pytest.raises(BadWeights, match=r"prove\(\): the engine's log-probabilities differ"):
            await engine.prove(wrong)
        launcher.workers[0].kill()
        await until(lambda: [each.number for each in engine.workers()] == [1, 2])


async def test_worker_with_other_first_weights_does_not_play() -> None:
    def plant(worker: InProcessWorker) -> None:
        launcher.on_start = lambda _: None
        object.__setattr__(worker.worker.engine._planner, "scores", lambda ids: [-9.0] * (len(ids) - 1))

    async with fleet(2, dice_engine(scores=Model())) as (engine, launcher), engine:
        await engine.prove(Model().proof())
        launcher.on_start = plant
        launcher.workers[0].kill()
        await until(lambda: [each.number for each in engine.workers()] == [1, 3])
        assert any(
            "worker 2" in event and "prove(): the engine's log-probabilities" in event for event in engine.events
        )


async def test_fleet_refuses_a_proof_of_another_vocabulary_first() -> None:
    async with fleet(2, dice_engine(scores=Model())) as (engine, launcher), engine:
        with pytest.raises(BadWeights, match="does not have the id 1000000"):
            await engine.update_weights("new", proof=WeightProof([*IDS, 10**6], [-1.0] * 40))
        assert engine.weight_version == "scripted"
        assert len(launcher.alive) == 2
