"""Parts for TRL's asynchronous GRPO trainer: a rollout worker, a weight sender, and sessions for its harness worker.

Checked with the classes of TRL 1.16.0 and openenv 0.10.0. The trainer itself needs a GPU, and was not run.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from runner.engines.base import BaseEngine
from runner.environment.environment import Environment
from runner.errors import BadOption, RunStopped
from runner.messages import as_messages
from runner.options import Sampling
from runner.runs.background_player import BackgroundPlayer, PlayedGroups
from runner.tasks import Task
from runner.trainers.openenv import training_trace
from runner.training.advantages import AdvantageRule, grpo
from runner.training.sample_rows import SampleRow, sample_rows
from runner.training.selection import refusal
from runner.trajectory import Group, Trajectory

__all__ = ["EpisodeSession", "EpisodeSessions", "RolloutWorker", "WeightSender"]

_POLL_SECONDS: Final = 0.2
_STOP_SECONDS: Final = 30.0


class RolloutWorker:
    """A worker that plays groups in the background, for `AsyncGRPOTrainer(rollout_worker=)`.

    Each segment of a trajectory is a sample, with the oldest weight version of its ids. Failed episodes and episodes
    without finite log-probabilities are left out, and so are groups in which fewer than two episodes remain. Groups are
    played ahead, up to the player's width. The weights that sampled such a group are older than the weights that are
    trained with it, so limit the width by `Concurrency(episodes=)`.

    Args:
        player: a started player, whose `group_size` is the trainer's `num_generations`.
        tasks: the tasks, played again and again in this order.
        rule: the function that computes the advantages of a group.
        samples: maximum number of samples that wait for the trainer; while this many wait, no further group is taken
            from the player.

    Raises:
        BadOption: there are no tasks, or `samples` is below 1.
    """

    def __init__(
        self, player: BackgroundPlayer, *, tasks: Iterable[Task], rule: AdvantageRule = grpo, samples: int = 256
    ) -> None:
        self._tasks = list(tasks)
        if not self._tasks or samples < 1:
            raise BadOption(
                f"RolloutWorker: {len(self._tasks)} tasks, samples={samples!r:.30}: give at least 1 of each."
            )
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(samples)
        """Samples for the trainer."""
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        """An empty queue, since rewards are in each sample's metrics."""
        self._player = player
        self._rule = rule
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._groups: PlayedGroups | None = None
        self._error: BaseException | None = None
        self._last = time.monotonic()
        self._version = 0
        self._version_of: dict[str, int] = {}

    def start(self) -> None:
        """Start playing. The weights that the engine has at the start are the trainer's version 0."""
        self.update_model_version(self._version)
        self._last = time.monotonic()
        self._groups = self._player.groups(itertools.cycle(self._tasks))
        self._thread = threading.Thread(target=self._run, name="deltarunner rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop playing at once. The run's summary counts the episodes in flight as cancelled."""
        self._stopped.set()
        if self._groups is not None:
            self._groups.close()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def update_model_version(self, model_version: int) -> None:
        """Record the trainer's version number of the weights that the engine now has."""
        self._version = model_version
        self._version_of[self._player.engine.weight_version] = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the worker, if there is one.

        Raises:
            RunStopped: no sample waits, and none was added for more than `stale_after_s` seconds.
        """
        error = self._error or self._player.error
        if error is not None:
            raise error
        silent = time.monotonic() - self._last
        if silent > stale_after_s and self.rollout_buffer.empty():
            raise RunStopped(f"no rollout was finished for {silent:.0f} s, more than {stale_after_s:g} s: see the log")

    def _run(self) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        assert self._groups is not None, "made by start()"
        try:
            for number, group in enumerate(self._groups):
                for fields in self._samples(group, number):
                    self._put(RolloutSample(**fields))
                if self._stopped.is_set():
                    return
        except BaseException as error:  # `check_health` raises this error in the trainer
            self._error = error
        finally:
            self._groups.close()

    def _put(self, sample: Any) -> None:
        while not self._stopped.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            self._last = time.monotonic()
            return

    def _samples(self, group: Group, number: int) -> Iterator[dict[str, Any]]:
        """Yield the fields of TRL's `RolloutSample` for each row of a group that has two or more scored episodes."""
        scored = [each for each in group.trajectories if not refusal(each)]
        if len(scored) < 2:
            return
        rewards = np.array([each.reward for each in scored], np.float32)
        for trajectory, advantage in zip(scored, self._rule(rewards, np.zeros(len(scored), np.int32)), strict=True):
            for row in sample_rows(trajectory):
                yield self._fields(row, float(advantage), number)

    def _fields(self, row: SampleRow, advantage: float, number: int) -> dict[str, Any]:
        messages = row.trajectory.segments[row.segment].messages
        said = next((place for place, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
        before = len(row.prompt_ids)
        return {
            "prompt": [dict(each) for each in messages[:said]],
            "completion": [dict(each) for each in messages[said:]],
            "input_ids": np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64),
            "completion_mask": np.concatenate([np.zeros(before, np.int64), row.mask.astype(np.int64)]),
            "old_log_probs": np.concatenate([np.zeros(before, np.float32), row.logprobs]),
            "advantage": advantage,
            "model_version": self._version_of.get(row.version, self._version),
            "group_id": number,
            "metrics": {"reward": float(row.trajectory.reward or 0.0)},
            "enqueued_at": time.time(),
        }


class WeightSender:
    """A sender of the trainer's weights to the player's engine, for `AsyncGRPOTrainer(weight_transfer=)`.

    Turns in flight are paused and then continue with the new weights; each id records its version.

    Args:
        player: the player of the `RolloutWorker`.
    """

    def __init__(self, player: BackgroundPlayer) -> None:
        self._player = player

    def init_weight_transfer(self) -> None:
        """Do nothing, since the engine is in this process."""

    def pause(self) -> None:
        """Do nothing, since `send_weights` pauses the turns in flight."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Send all weights at once; the tensors are kept in memory until the update."""
        self._player.update_weights(dict(iterator))

    def resume(self) -> None:
        """Do nothing, since turns continue after `send_weights`."""

    def destroy(self) -> None:
        """Do nothing, since the owner of the player closes it."""


class EpisodeSessions:
    """Episodes as OpenEnv sessions, for TRL's `HarnessRolloutWorker(harness_session_factory=)`.

    TRL's worker calls the factory in its own process. Therefore the arguments must be picklable, and `make_engine`
    makes the engine in that process: a `RemoteEngine` for the server whose weights the trainer updates. Give the
    trainer `functools.partial(EpisodeSessions, Environment, make_engine, tasks)`.

    Args:
        environment: the environment's class.
        make_engine: a function that makes the engine.
        tasks: the task of each prompt of the data set; the key of a conversation is the text of its last message.
        sampling: the trainer's sampling, as `Sampling.of_request` takes it, in place of the environment's sampling.
    """

    def __init__(
        self,
        environment: type[Environment[Any]],
        make_engine: Callable[[], BaseEngine],
        tasks: Mapping[str, Task],
        *,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self._tasks = tasks
        self._player = BackgroundPlayer(
            environment, make_engine(), sampling=Sampling.of_request(sampling or {})
        ).start()

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> EpisodeSession:
        """Return the session of one episode, which begins with `wait_for_completion`.

        Raises:
            BadOption: the prompt has no task.
        """
        text = task if isinstance(task, str) else task[-1]["content"]
        if text not in self._tasks:
            raise BadOption(f"the prompt {text!r:.80} of the data set has no task in tasks=: add one.")
        return EpisodeSession(self._player, self._tasks[text])

    def close(self) -> None:
        """End the run and its engine."""
        self._player.close(cancel=True)


class EpisodeSession:
    """One episode as a session of OpenEnv. The session itself plays the episode."""

    def __init__(self, player: BackgroundPlayer, task: Task) -> None:
        self._player = player
        self._task = task
        self._trajectory: Trajectory | None = None

    def initial_messages(self) -> list[Any]:
        """The task's messages."""
        return list(as_messages(self._task.prompt))

    def list_tools(self) -> list[Any]:
        """Return an empty list, since the episode calls its own tools."""
        return []

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Raise an error, since the episode calls its own tools.

        Raises:
            BadOption: always.
        """
        raise BadOption(f"call_tool({name!r}): the episode calls its own tools; leave harness_adapter out.")

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Play the episode and return 0. The environment's `Limits(seconds=)` limits its time; `timeout_s` does not."""
        self._trajectory, *_ = self._player.play(self._task)
        return 0

    def fetch_training_trace(self) -> Any:
        """The episode as OpenEnv's `TrainingTrace`.

        Raises:
            BadBatch: a turn has no ids or no log-probabilities.
            RuntimeError: the episode was not played.
        """
        from openenv.core.harness import TrainingTrace

        return TrainingTrace.model_validate(training_trace(self._played))

    def verify(self, transcript: Sequence[Any], final_state: Any = None) -> Any:
        """The reward of the episode as OpenEnv's `VerifyResult`; the reward is None if the episode failed."""
        from openenv.core.harness import VerifyResult

        return VerifyResult(env_reward=self._played.reward, done=True)

    def close(self) -> None:
        """Do nothing, since the episode is over."""

    @property
    def _played(self) -> Trajectory:
        if self._trajectory is None:
            raise RuntimeError("the episode was not played: call wait_for_completion() first")
        return self._trajectory
