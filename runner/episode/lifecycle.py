"""The life of an episode: one environment, set up, played, scored and closed, whatever happens in between."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from runner.concurrency.cancellation import cancellation_is_asked_for, forget_native_cancellation
from runner.concurrency.clocks import Clock, Waiting
from runner.concurrency.user_code import AuthorCode, TooSlow, describe_error
from runner.engines.base import FinishReason
from runner.environment.environment import Environment
from runner.episode.context import RunContext
from runner.episode.episode import MAIN, Episode, EpisodeKey
from runner.episode.limits import Ending, EpisodeLimits
from runner.errors import BadTask, EpisodeOver
from runner.messages import Message, as_messages
from runner.scoring import Score, ScorerKind, as_metrics, scores_by_agent, weighted_sum
from runner.tasks import own_copy
from runner.trajectory import Outcome, Trajectory

__all__ = ["Phase", "Play"]


class Phase(enum.StrEnum):
    """Where in its life an episode stands."""

    SETUP = "setup"
    PLAYING = "playing"
    SCORING = "scoring"
    CLOSING = "closing"
    OVER = "over"


class Play:
    """One episode being played. What goes wrong in it stays in it.

    Attributes:
        key: which play of which task.
        phase: where it stands.
        activity: what it waits for, for people.
        since: when it began to, in the event loop's time.
        began: when it was started.
        faults: what went wrong without changing the outcome: `close()` or a metric that raised.
    """

    def __init__(self, context: RunContext, key: EpisodeKey) -> None:
        self.key = key
        self.phase = Phase.SETUP
        self.activity = "setup"
        self.began = self.since = anyio.current_time()
        self.faults: list[str] = []
        self._context = context
        self._author = AuthorCode(context.workers)
        self._allowance = EpisodeLimits(context.limits)
        self._outer = Clock()
        self._scoring = Clock()
        self._cut: Ending | None = None
        self._ending: Ending | None = None
        self._rewards: dict[str, dict[str, Score]] = {}
        self._metrics: dict[str, float] = {}
        self._environment = self._made()
        self.episode = self._environment.episode = Episode(
            key, context, self._environment, self._allowance, self._author, self._report_activity, self._leave
        )

    def _made(self) -> Environment[Any]:
        task = self.key.task
        try:
            environment = self._context.environment.fresh()
            task = own_copy(task)
        except (Exception, SystemExit) as error:
            self._fail(error)
            environment = Environment()
        environment.task = task
        environment.shared = self._context.shared
        environment.tools = environment.bound_tools()
        return environment

    @property
    def permanent(self) -> bool:
        """Played again, it would end the same."""
        return self._ending is not None and self._ending.permanent

    def cancel(self, ending: Ending | None = None) -> None:
        """Cut the play where it stands; it is closed and kept, as partial unless another ending is given."""
        scopes = {Phase.SETUP: self._outer, Phase.PLAYING: self._allowance.play, Phase.SCORING: self._scoring}
        if self.phase in scopes and self._cut is None:
            self._cut = ending or Ending(Outcome.CANCELLED)
            scopes[self.phase].scope.cancel()

    async def run(self) -> list[Trajectory]:
        """Play the episode and return the trajectories of its agents, `main` first.

        Cancelled from outside, it still closes the environment, in a bounded shield, and keeps what it has in
        `trajectories()`.
        """
        try:
            await self._live_and_unwind()
        except anyio.get_cancelled_exc_class():
            if cancellation_is_asked_for():
                raise
            forget_native_cancellation()
            self._ending = Ending(Outcome.ENV_ERROR, error="the environment cancelled the task of its episode")
        finally:
            self.phase = Phase.OVER
            for conversation in self.episode.conversations.values():
                await conversation.close()
        return self.trajectories()

    async def _live_and_unwind(self) -> None:
        with self._outer as outer:
            passing: BaseException | None = None
            try:
                await self._live()
            except BaseException as error:
                passing = error
            self._enter(Phase.CLOSING)
            cut_before = outer.fired
            outer.scope.shield = True
            outer.start(self._allowance.limits.close_seconds)
            await self._unwind(passing)
        if outer.fired and not cut_before:
            self.faults.append(f"exit_stack: unwinding took longer than {outer.seconds:g} s")

    async def _live(self) -> None:
        if self._ending is not None or not await self._set_up():
            return
        try:
            ending = await self._play()
            if ending.outcome.scored and any(agent.turns for agent in self.episode.conversations.values()):
                await self._score(ending)
        finally:
            self._enter(Phase.CLOSING)
            if self._environment.overrides("close"):
                await self._close()

    async def _set_up(self) -> bool:
        self._outer.start(self._allowance.limits.setup_seconds)
        environment = self._environment
        try:
            self.episode.stack_open = True
            if environment.overrides("setup"):
                await self._author.call(environment.setup, name="setup()")
            self.episode.heed_limits()
            self.episode.stack_open = False
        except anyio.get_cancelled_exc_class():
            self._blame_setup()
            raise
        except Exception as error:
            self._fail(error)
            return False
        finally:
            self.episode.stack_open = False
        return True

    def _blame_setup(self) -> None:
        if self._outer.fired and self._cut is None:
            seconds = self._allowance.limits.setup_seconds
            self._ending = Ending(Outcome.ENV_ERROR, "setup_seconds", error=f"setup took longer than {seconds:g} s")

    async def _open_main(self) -> None:
        environment = self._environment
        self._report_activity("prompt")
        prompt = environment.task.prompt
        if environment.overrides("prompt"):
            prompt = await self._author.call(environment.prompt, name="prompt()")
        messages = as_messages(prompt)
        self._check_prompt(messages)
        self.episode.open_conversation(
            MAIN,
            system_prompt=environment.system_prompt,
            prompt=messages,
            tools=environment.tools,
            train=MAIN not in self._context.other_models,
        )

    def _check_prompt(self, messages: Sequence[Message]) -> None:
        if self._environment.system_prompt is not None and messages and messages[0]["role"] == "system":
            raise BadTask(
                f"the prompt of task {self.key.task.id!r} begins with a system message, and the environment has a "
                f"system_prompt: set system_prompt = None, or leave the message out."
            )

    async def _play(self) -> Ending:
        error: BaseException | None = None
        try:
            await self._open_main()
        except Exception as raised:
            return self._fail(raised)
        except anyio.get_cancelled_exc_class():
            self._blame_setup()
            raise
        if self._outer.fired:  # and whoever was cancelled went on as if nothing were
            self._blame_setup()
            return self._ending or self._cut or Ending(Outcome.CANCELLED)
        self._outer.lift()
        self._enter(Phase.PLAYING)
        play = self._allowance.play
        with play:
            play.start(self._allowance.limits.seconds)
            try:
                rollout = self._environment.rollout
                await self._author.call(rollout, self.episode.conversations[MAIN], name="rollout()")
                self.episode.check_limits()
            except (Exception, BaseExceptionGroup) as raised:
                error = raised
        self._ending = self._judge(error)
        return self._ending

    def _judge(self, error: BaseException | None) -> Ending:
        """How the play ended. A limit that fired comes before what the author raised after it."""
        if self._cut is not None:
            return self._cut
        if self._author.abandoned:
            text = f"{self._author.abandoned} did not come back in time; its thread was left behind and may still write"
            return Ending(Outcome.ENV_ERROR, _limit_of(error) or "seconds", error=text)
        allowance = self._allowance
        if allowance.ending is not None and allowance.ending.outcome is not Outcome.COMPLETED:
            return allowance.ending
        if allowance.play.fired and allowance.ending is None:
            return Ending(Outcome.TIME_LIMIT, "seconds")
        if allowance.no_room is not None:
            return allowance.no_room
        if error is not None and not _only(error, EpisodeOver):
            return Ending(Outcome.ENV_ERROR, _limit_of(error), error=describe_error(error))
        return self._by_last_turn()

    def _by_last_turn(self) -> Ending:
        last = self._allowance.last_turn
        if last is None or last.finish not in _CUT or self.episode.ended:
            return Ending(Outcome.COMPLETED)
        return Ending(_CUT[last.finish], str(last.stop), last.agent)

    def _fail(self, error: BaseException) -> Ending:
        self._ending = Ending(Outcome.ENV_ERROR, _limit_of(error), error=describe_error(error))
        return self._ending

    async def _score(self, ending: Ending) -> None:
        self._enter(Phase.SCORING)
        seconds = self._allowance.limits.reward_seconds
        with self._scoring as clock:
            clock.start(seconds)
            for scorer in self._context.scorers:
                if scorer.kind != ScorerKind.GROUP_REWARD:
                    await self._score_one(scorer.name, scorer.kind, ending)
        if self._cut is not None:
            self._ending = self._cut
        elif clock.fired or self._author.abandoned:
            text = f"rewards took longer than {seconds:g} s (in {self.activity})"
            self._ending = Ending(Outcome.ENV_ERROR, "reward_seconds", error=text)

    async def _score_one(self, name: str, kind: str, ending: Ending) -> None:
        self._report_activity(f"{kind} {name}()")
        self._allowance.begin_scoring()
        try:
            value = await self._author.call(getattr(self._environment, name), name=f"{kind} {name}()")
            self._keep_score(name, kind, value)
        except Exception as error:
            if kind == ScorerKind.METRIC:
                self.faults.append(f"metric {name}(): {describe_error(error)}")
                return
            self._keep_score(name, kind, None)
            self._blame_reward(f"reward {name}(): {describe_error(error)}", ending)

    def _blame_reward(self, error: str, ending: Ending) -> None:
        failure = self._allowance.ending
        if failure is not None and failure.outcome is Outcome.ENGINE_ERROR:
            self._ending = failure
        elif ending.outcome is Outcome.COMPLETED:
            self._ending = Ending(Outcome.ENV_ERROR, error=error)
        else:
            self.faults.append(error)

    def _keep_score(self, name: str, kind: str, value: Any) -> None:
        if kind == ScorerKind.METRIC:
            self._metrics.update(as_metrics(value, name))
            return
        trained = [c.name for c in self.episode.conversations.values() if c.train] or [MAIN]
        for agent, score in scores_by_agent(value, name, trained).items():
            self._rewards.setdefault(agent, {})[name] = score

    async def _close(self) -> None:
        seconds = self._allowance.limits.close_seconds
        try:
            with anyio.CancelScope(shield=True):
                await self._author.call(self._environment.close, name="close()", seconds=seconds)
        except (Exception, BaseExceptionGroup) as error:
            self.faults.append(f"close(): {describe_error(error)}")

    async def _leave(self, leaving: Callable[[], bool | None], name: str) -> bool | None:
        """Leave one thing of the exit stack in a thread; one that takes too long is left behind, and the next goes on.

        The clock over the whole unwinding stands still, and a cancellation waits: each exit has its own limit.
        """
        seconds = self._allowance.limits.close_seconds
        with Waiting(), anyio.CancelScope(shield=True):
            try:
                swallowed: bool | None = await self._author.call(leaving, name=name, seconds=seconds)
            except TooSlow as error:
                self.faults.append(f"exit_stack: {error}; its thread was left behind")
                return None
        return swallowed

    async def _unwind(self, passing: BaseException | None) -> None:
        """Leave what `setup()` entered. What is passing goes through it: a task group that died cancelled its host."""
        stack = self.episode.stack
        try:
            swallowed = await stack.unwind(passing)
            if passing is not None and not swallowed:
                raise passing
            if passing is not None:
                self._ending = Ending(Outcome.ENV_ERROR, error="what setup() entered ended the episode")
        except (Exception, SystemExit, BaseExceptionGroup) as error:
            if passing is None:
                self.faults.append(f"exit_stack: {describe_error(error)}")
            else:
                self._fail(error)

    def trajectories(self) -> list[Trajectory]:
        """What each agent that spoke saw and did; `main` first, also silent where no trained one spoke."""
        ending = self._ending or self._cut or Ending(Outcome.CANCELLED)
        seconds = anyio.current_time() - self.began
        conversations = self.episode.conversations
        spoke = {name: agent for name, agent in conversations.items() if agent.turns}
        others = [self._trajectory(name, ending, seconds) for name in spoke if name != MAIN]
        # Where nobody is there to be trained on, something must still say how the episode ended.
        if MAIN not in spoke and any(agent.train for agent in spoke.values()):
            return others
        # An agent that spoke in setup() was opened before `main`; and where setup() failed there is no `main` yet.
        main = self._trajectory(MAIN, ending, seconds) if MAIN in conversations else self._empty(MAIN, ending, seconds)
        return [main, *others]

    def _empty(self, agent: str, ending: Ending, seconds: float) -> Trajectory:
        key = self.key
        return Trajectory(
            id=self.episode.id,
            task=key.task,
            index=key.index,
            agent=agent,
            seed=self.episode.seed,
            visit=key.visit,
            attempt=key.attempt,
            trained=agent == MAIN and MAIN not in self._context.other_models,
            outcome=ending.outcome,
            limit=ending.limit,
            limit_agent=ending.agent,
            reason=self.episode.reason,
            error=ending.error,
            seconds=seconds,
        )

    def _trajectory(self, agent: str, ending: Ending, seconds: float) -> Trajectory:
        conversation = self.episode.conversations[agent]
        trajectory = self._empty(agent, ending, seconds)
        trajectory.trained = conversation.train
        conversation.into_trajectory(trajectory)
        trajectory.waited = sum(turn.timings.queued for turn in trajectory.turns)
        trajectory.metrics = dict(self._metrics)
        if not ending.outcome.scored or not trajectory.turns:
            return trajectory
        trajectory.rewards = self._rewards.get(agent, {})
        grouped = any(scorer.kind == ScorerKind.GROUP_REWARD for scorer in self._context.scorers)
        # With group rewards the sum waits for them: until then there is none.
        if not grouped:
            trajectory.reward = weighted_sum(trajectory.rewards, self._context.scorers)
        return trajectory

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._report_activity(phase.value)

    def _report_activity(self, what: str) -> None:
        self.activity = what
        self.since = anyio.current_time()


_CUT = {FinishReason.LENGTH: Outcome.TOKEN_LIMIT, FinishReason.CONTEXT: Outcome.CONTEXT_LIMIT}


def _only(error: BaseException, kind: type[BaseException]) -> bool:
    """It is of this kind, or a group of nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(kind)[1] is None
    return isinstance(error, kind)


def _limit_of(error: BaseException | None) -> str:
    if not isinstance(error, TooSlow):
        return ""
    return "step_seconds" if error.name == "step()" else "tool_seconds"
