"""TRL's asynchronous trainer without the trainer: its protocols compared with ours, and its records filled."""

from __future__ import annotations

import importlib
import inspect
import threading
import time
from typing import Any

import anyio
import numpy as np
import pytest

from runner import BackgroundPlayer, BadOption, Concurrency, Conversation, RunStopped
from runner.testing import ScriptedEngine
from runner.trainers.trl_async import RolloutWorker, WeightSender
from tests.trainers.test_trl_rollouts import TASKS, Rewarded

pytestmark = [pytest.mark.package("trl"), pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def protocols() -> Any:
    return importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")


@pytest.mark.parametrize(
    ("protocol", "own"), [("RolloutWorkerProtocol", RolloutWorker), ("WeightTransferProtocol", WeightSender)]
)
def test_protocols_of_trl_have_our_methods_and_parameters(protocol: str, own: type) -> None:
    theirs = getattr(protocols(), protocol)
    methods = {name: each for name, each in vars(theirs).items() if inspect.isfunction(each) and name[0] != "_"}
    assert methods
    for name, method in methods.items():
        assert list(inspect.signature(getattr(own, name)).parameters) == list(inspect.signature(method).parameters), (
            name
        )


def test_worker_fills_samples_of_trl_with_their_version() -> None:
    engine = ScriptedEngine("Yes")
    with BackgroundPlayer(Rewarded, engine, group_size=2, concurrency=Concurrency(episodes=4)) as player:
        worker, transfer = RolloutWorker(player, tasks=[TASKS[2], TASKS[1]], samples=4), WeightSender(player)
        transfer.init_weight_transfer()
        worker.start()
        first = [worker.rollout_buffer.get(timeout=60) for _ in range(4)]
        worker.check_health(60)
        transfer.pause()
        transfer.send_weights(iter({"weight": 1}.items()))
        transfer.resume()
        worker.update_model_version(1)
        later = [worker.rollout_buffer.get(timeout=60) for _ in range(24)]
        worker.stop()
        transfer.destroy()
    for sample in first:
        assert type(sample).__name__ == "RolloutSample"
        assert len(sample.input_ids) == len(sample.completion_mask) == len(sample.old_log_probs)
        assert (sample.old_log_probs[sample.completion_mask == 0] == 0).all()
        assert engine.tokenizer.decode(sample.input_ids[sample.completion_mask == 1].tolist()).startswith("Yes")
        assert sample.completion[0]["role"] == "assistant"
        assert sample.metrics == {"reward": 2.0}  # the episodes of t1 fail, and return no sample
    assert {sample.model_version for sample in first} == {0}
    assert later[-1].model_version == 1
    assert len({sample.group_id for sample in first}) == 1  # two episodes of two segments each
    assert np.isfinite(first[0].advantage)


class Waits(Rewarded):
    """Environment whose episodes never end."""

    async def rollout(self, conversation: Conversation) -> None:
        BEGUN.set()
        await anyio.sleep_forever()


BEGUN = threading.Event()


def test_stopped_worker_cancels_the_episodes_in_flight() -> None:
    with BackgroundPlayer(Waits, ScriptedEngine("Yes"), group_size=2, concurrency=Concurrency(episodes=4)) as player:
        worker = RolloutWorker(player, tasks=[TASKS[2]])
        worker.start()
        assert BEGUN.wait(60)
        worker.stop()
        assert "deltarunner rollouts" not in [thread.name for thread in threading.enumerate()]
        worker.check_health(60)
    assert player.player.run.summary.outcomes == {"cancelled": 4}


def test_worker_raises_the_error_that_ended_it() -> None:
    with BackgroundPlayer(Rewarded, ScriptedEngine("Yes"), group_size=2) as player:
        worker = RolloutWorker(player, tasks=[TASKS[1]])  # every episode of this task fails
        worker.start()
        time.sleep(0.5)
        with pytest.raises(RunStopped, match="no rollout was finished"):
            worker.check_health(0.25)
        worker.stop()
        with pytest.raises(BadOption, match="0 tasks"):
            RolloutWorker(player, tasks=[])
