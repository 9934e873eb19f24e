"""The life cycle of an episode: one environment is set up, played, scored and closed, even after an error."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import anyio

from runner.concurrency.cancellation import cancellation_is_asked_for, forget_native_cancellation
from runner.concurrency.clocks import Clock
from runner.concurrency.own_task import OwnTask
from runner.concurrency.user_code import HOW_TO_CLOSE, describe_error, is_async
from runner.episode.chat_service import ChatService
from runner.episode.conversation import Conversation, open_conversation, open_thread
from runner.episode.episode import Episode
from runner.episode.hooks import check_reply, check_system_prompts, unclosed
from runner.episode.key import MAIN, EpisodeKey
from runner.episode.limits import Ending
from runner.episode.outcome import failure, judge, silent
from runner.episode.shared import RunShared
from runner.episode.state import EpisodeState
from runner.episode.thread_names import name_threads
from runner.messages import as_messages
from runner.scoring import Score, Scorer, ScorerKind, as_metrics, scores_by_agent, weighted_sum
from runner.store.storable import make_storable
from runner.tasks import deep_copy
from runner.tokens.log import TokenLog
from runner.trajectory import Outcome, Trajectory

__all__ = ["EpisodeRunner", "Phase"]


class Phase(enum.StrEnum):
    """The phase of an episode's life cycle."""

    SETUP = "setup"
    PLAYING = "playing"
    SCORING = "scoring"
    CLOSING = "closing"
    OVER = "over"


class EpisodeRunner(EpisodeState):
    """The runner of one attempt at an episode, from a fresh environment to its trajectories.

    Errors are recorded, not raised.

    `EpisodeState` has the part of the state that conversations and the author's `Episode` use.
    """

    def __init__(self, shared: RunShared, key: EpisodeKey) -> None:
        super().__init__(key, shared)
        self.phase = Phase.SETUP
        self.began = anyio.current_time()
        """Time when this object was created, on the event loop's clock."""
        self.chat_service = ChatService(self, open_thread)
        """The service that answers requests with whole histories."""
        self.episode = Episode(self, self.chat_service)
        """The author's view of the episode."""
        # All hooks run in this task, so that one hook may close a cancel scope or task group that another hook opened.
        self._task = OwnTask()
        self._opening = self._task.clock()
        self._scoring = Clock()
        self._ending: Ending | None = None
        self._was_cut = False
        self._closed_late: list[str] = []
        self._rewards: dict[str, dict[str, Score]] = {}
        self._metrics: dict[str, float] = {}
        self._make_environment()

    def _make_environment(self) -> None:
        """Construct the environment of the episode. If that fails, no hook is called."""
        try:
            environment = self.part.environment.fresh()
            task = self.part.own(deep_copy(self.key.task))
        except (Exception, SystemExit) as error:
            self._ending = failure(error)
            return
        environment.task = task
        environment.shared = self.part.resources
        environment.tools = environment.bound_tools()
        environment.episode = self.episode
        self.environment = environment

    @property
    def permanent(self) -> bool:
        """True if another attempt would fail in the same way."""
        return self._ending is not None and self._ending.permanent

    @property
    def turns_taken(self) -> int:
        """Number of turns of `main` so far."""
        return len(self.episode.turns)

    def trained_logs(self) -> Iterator[TokenLog]:
        """Yield the token logs so far of the trained agents."""
        for conversation in self.conversations.values():
            if conversation.train:
                yield from (segment.log for segment in conversation.segments)

    def cancel(self, ending: Ending | None = None) -> None:
        """Cut the setup, the rollout or the scoring. The episode is then closed and recorded.

        The outcome is CANCELLED unless another ending is given.
        """
        # Closing is not cut, since it has its own limit, and the author's resources must be closed.
        scopes = {Phase.SETUP: self._opening, Phase.PLAYING: self.limits.clock, Phase.SCORING: self._scoring}
        if self.phase in scopes and not self._was_cut:
            self._was_cut, self._ending = True, ending or Ending(Outcome.CANCELLED)
            scopes[self.phase].scope.cancel()

    async def run(self, *, in_this_task: bool = False) -> list[Trajectory]:
        """Play the episode and return the trajectories of its agents, `main` first.

        If this call is cancelled from outside, it still closes the environment, in a shield with a time limit, and
        `trajectories()` still returns the results.

        Args:
            in_this_task: run the hooks in the calling task instead of a new one, for debuggers.
        """
        try:
            await self._task.run(
                self._live_and_unwind,
                close_rest=self._close_rest,
                name=f"episode {self.key.id}",
                in_this_task=in_this_task,
            )
        except anyio.get_cancelled_exc_class():
            if cancellation_is_asked_for():
                raise
            # The author's code cancelled its own task; the run continues.
            forget_native_cancellation()
            died = next((fault for fault in self.faults if fault.startswith("close(): ")), "")
            cause = (
                "a timeout or a cancel scope of a hook ended in another hook, or task.cancel() was called; "
                "enter and leave a timeout or a scope around the code that it limits"
            )
            text = (
                f"a context that a hook opened ended the episode; {died}"
                if died
                else f"the environment cancelled the task of its episode: {cause}"
            )
            self._ending = Ending(Outcome.ENV_ERROR, error=text)
        finally:
            self.phase = Phase.OVER
            self._blame_left_open()
            # A task that the author started may still be sampling.
            for conversation in self.episode.conversations.values():
                await conversation.close()
        return self.trajectories()

    async def _live_and_unwind(self) -> None:
        passing: BaseException | None = None
        try:
            passing = await self._live()
        except Exception as error:
            passing, self._ending = error, failure(error)
        except BaseException as error:
            # Cancellations pass through `_unwind` too, since they must reach the contexts that `setup()` entered.
            passing = error
        self._begin_closing()
        if passing is None and self.exit_stack.is_empty and next(unclosed(self.environment), None) is None:
            return
        outer = self._task.clock(self.limits.configured.close_seconds)
        cut_before = outer.fired
        with outer:
            await self._unwind(passing)
            await self._close_rest()
        if outer.fired and not cut_before:
            self.faults.append(f"exit_stack: unwinding took longer than {outer.seconds:g} s")

    async def _live(self) -> BaseException | None:
        """Run until the environment is closed. Return the cancellation that cut its setup, or None."""
        if self._ending is not None:
            return None
        was_set_up, cut, main = False, None, None
        try:
            with self._opening as clock:
                clock.start(self.limits.configured.setup_seconds)
                try:
                    was_set_up = await self._set_up()
                    main = await self._opened_main() if was_set_up else None
                except anyio.get_cancelled_exc_class() as error:
                    cut = error
                    raise
            if clock.fired:  # the clock is checked, since the cancelled code may have swallowed the cancellation
                self._blame_setup(clock.seconds)
            elif main is not None:
                await self._play_and_score(main)
        finally:
            self._begin_closing()
            if was_set_up and self.environment.overrides("close"):
                await self._close()
        return cut

    async def _play_and_score(self, main: Conversation) -> None:
        ending = await self._run_rollout(main)
        name_threads(self, self.chat_service.threads)
        if ending.outcome.scored and any(conversation.turns for conversation in self.conversations.values()):
            await self._score(ending)

    def _begin_closing(self) -> None:
        """Enter the closing phase, limited only by `close_seconds`. Until its end, cancellations of the run wait."""
        if self.phase is not Phase.CLOSING:
            self._enter(Phase.CLOSING)
            self._task.shield()
            # An earlier cancellation must not cancel the scopes that are left in this phase.
            forget_native_cancellation()

    # --- before the first turn

    async def _set_up(self) -> bool:
        try:
            self.exit_stack_open = True
            if self.environment.overrides("setup"):
                await self.author_code.call(self.environment.setup, name="setup()")
            self.take_limits()
        except Exception as error:
            self._ending = failure(error)
            return False
        finally:
            self.exit_stack_open = False
        return True

    def _blame_setup(self, seconds: float | None) -> None:
        if self._ending is None:
            self._ending = Ending(Outcome.ENV_ERROR, "setup_seconds", error=f"setup took longer than {seconds:g} s")

    async def _opened_main(self) -> Conversation | None:
        try:
            return await self._open_main()
        except Exception as error:
            self._ending = failure(error)
            return None

    async def _open_main(self) -> Conversation:
        environment, task = self.environment, self.environment.task
        self.report_activity("prompt")
        prompt = task.prompt
        if environment.overrides("prompt"):
            prompt = await self.author_code.call(environment.prompt, name="prompt()")
            check_reply("prompt", prompt)
        messages = as_messages(prompt)
        check_system_prompts(environment, environment.system_prompt, self.key.task, messages)
        return open_conversation(
            self,
            MAIN,
            system_prompt=environment.system_prompt,
            prompt=messages,
            tools=environment.tools,
            train=self.shared.trains_main,
            counted=self.shared.trains_main or self.shared.evaluates(MAIN),
        )

    # --- playing

    async def _run_rollout(self, main: Conversation) -> Ending:
        error: BaseException | None = None
        self._enter(Phase.PLAYING)
        with self.limits.clock as clock:
            clock.start(self.limits.configured.seconds)
            # Requests are answered only for an author's own rollout, since the default rollout starts no client.
            async with (
                self.chat_service.open(self._task.tasks) if self.environment.overrides("rollout") else nullcontext()
            ):
                try:
                    await self.author_code.call(self.environment.rollout, main, name="rollout()")
                    self.check_limits()
                except (Exception, BaseExceptionGroup) as raised:
                    error = raised
        self._ending = self._ending or judge(self, error)
        return self._ending

    # --- after the last turn

    async def _score(self, ending: Ending) -> None:
        self._enter(Phase.SCORING)
        seconds = self.limits.configured.reward_seconds
        with self._scoring as clock:
            clock.start(seconds)
            for scorer in self.part.scorers:
                if scorer.kind != ScorerKind.GROUP_REWARD:
                    await self._score_one(scorer, ending)
        if clock.fired or self.author_code.abandoned:
            text = f"rewards took longer than {seconds:g} s (in {self.activity})"
            self._fail_scoring(Ending(Outcome.ENV_ERROR, "reward_seconds", error=text))

    async def _score_one(self, scorer: Scorer, ending: Ending) -> None:
        name, kind = scorer.name, scorer.kind
        self.report_activity(f"{kind} {name}()")
        # The limits are reset before each reward, so that a judge that reached a limit in one reward may take turns in
        # the next reward.
        self.limits.begin_scoring()
        try:
            value = await self.author_code.call(getattr(self.environment, scorer.method), name=f"{kind} {name}()")
            self._keep_score(name, kind, value)
        except Exception as error:
            if kind == ScorerKind.METRIC:
                self.faults.append(f"metric {name}(): {describe_error(error)}")
                return
            self._keep_score(name, kind, None)
            self._blame_reward(f"reward {name}(): {describe_error(error)}", ending)

    def _blame_reward(self, error: str, ending: Ending) -> None:
        failed = self.limits.silenced_by
        if failed is not None and failed.outcome is Outcome.ENGINE_ERROR:
            self._fail_scoring(failed)
        elif ending.outcome is Outcome.COMPLETED:
            self._fail_scoring(Ending(Outcome.ENV_ERROR, error=error))
        else:
            self.faults.append(error)

    def _fail_scoring(self, ending: Ending) -> None:
        if not self._was_cut:  # the error of a cut episode is a consequence of the cut, and not a fault of the reward
            self._ending = ending

    def _keep_score(self, name: str, kind: str, value: Any) -> None:
        if kind == ScorerKind.METRIC:
            self._metrics.update(as_metrics(value, name))
            return
        trained = [conversation.name for conversation in self.conversations.values() if conversation.train] or [MAIN]
        for agent, score in scores_by_agent(value, name, trained).items():
            self._rewards.setdefault(agent, {})[name] = score

    async def _close(self) -> None:
        close, own = self.environment.close, self._task
        # If a scope that `setup()` entered was cancelled, `close()` needs a shield, since that scope is left later. In
        # other cases there is no shield, since `close()` may leave a scope, which is impossible under a shield.
        shield = own.outer.fired or (cancellation_is_asked_for() and not self.exit_stack.is_empty)
        options: dict[str, Any] = {} if shield or not is_async(close) else {"clock": own.clock}
        seconds = self.limits.configured.close_seconds
        try:
            with anyio.CancelScope(shield=True) if shield else nullcontext():
                await self.author_code.call(close, name="close()", seconds=seconds, **options)
        except (Exception, BaseExceptionGroup) as error:
            self.faults.append(f"close(): {describe_error(error)}")

    async def _unwind(self, passing: BaseException | None) -> None:
        """Leave the contexts that `setup()` entered.

        The current error passes through the contexts, since a failed task group cancels its host task.
        """
        try:
            swallowed = await self.exit_stack.unwind(passing)
            if passing is not None and not swallowed and not self._opening.fired:
                raise passing
            if passing is not None and not self._opening.fired:
                self._ending = Ending(Outcome.ENV_ERROR, error="a context that setup() entered ended the episode")
        except anyio.get_cancelled_exc_class():
            if not self._opening.fired or cancellation_is_asked_for():
                raise
            forget_native_cancellation()  # the cancellation came from a context of `setup()`, and all contexts are left
        except (Exception, SystemExit, BaseExceptionGroup) as error:
            if passing is None:
                self.faults.append(f"exit_stack: {describe_error(error)}")
            else:
                self._ending = failure(error)

    async def _close_rest(self) -> None:
        """Close the resources that hooks left open, if they are attributes of the environment."""
        for name, close in unclosed(self.environment):
            self._closed_late.append(f"self.{name}")
            # If another part of the resource is unreachable, this part cannot be closed either.
            with suppress(Exception, BaseExceptionGroup), self._task.clock(self.limits.configured.close_seconds):
                await close()

    def _blame_left_open(self) -> None:
        """Record the resources that hooks left open.

        A resource that could not be closed fails the episode, since its processes may still run.
        """
        task, closed = self._task, ", ".join(self._closed_late)
        if not task.left_open and not closed:
            return
        if not task.cannot_be_left:
            were = "were" if len(self._closed_late) > 1 else "was"
            self.faults.append(f"{closed or 'a resource'} {were} opened in a hook and never closed; {HOW_TO_CLOSE}")
            return
        unclosed_scopes = [fault for fault in self.faults if HOW_TO_CLOSE in fault]
        text = f"a task group or a cancel scope was opened in a hook and never closed; {HOW_TO_CLOSE}"
        text = "; ".join(unclosed_scopes) or text
        if self._was_cut or self._ending is None or self._ending.outcome.failed:
            self.faults.append(text)
        else:
            self._ending = Ending(Outcome.ENV_ERROR, error=text)

    # --- the result

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectory of each agent with turns, `main` first.

        If neither `main` nor a trained agent took a turn, `main` has a trajectory without turns.

        The episode fails if the author stored a value in it that a run file cannot hold.
        """
        ending = self._ending or Ending(Outcome.CANCELLED)
        trajectories = self._trajectories(ending)
        trajectories[0].attachments = list(self.attachments)
        problems = [problem for each in trajectories if (problem := make_storable(each)) is not None]
        if not problems or not ending.outcome.scored:
            return trajectories
        self._ending = Ending(Outcome.ENV_ERROR, error=problems[0])
        refused = self._trajectories(self._ending)
        refused[0].attachments = list(self.attachments)
        return refused

    def _trajectories(self, ending: Ending) -> list[Trajectory]:
        name_threads(self, self.chat_service.threads)
        seconds = anyio.current_time() - self.began
        spoke = {name: conversation for name, conversation in self.conversations.items() if conversation.turns}
        others = [self._trajectory(name, ending, seconds) for name in spoke if name != MAIN]
        # If no trained agent took a turn, a trajectory of `main` records how the episode ended.
        if MAIN not in spoke and any(conversation.train for conversation in spoke.values()):
            return others
        # An agent that took a turn in setup() was opened before `main`. If setup() failed, `main` does not exist yet.
        main = (
            self._trajectory(MAIN, ending, seconds)
            if MAIN in self.conversations
            else self._empty(MAIN, ending, seconds)
        )
        return [main, *others]

    def _empty(self, agent: str, ending: Ending, seconds: float) -> Trajectory:
        trajectory = silent(self.shared, self.key, ending, agent)
        trajectory.limit_agent = self.renamed.get(ending.agent, ending.agent)
        trajectory.reason = str(self.episode.reason)  # an author may have assigned any value
        trajectory.seconds = seconds
        return trajectory

    def _trajectory(self, agent: str, ending: Ending, seconds: float) -> Trajectory:
        conversation = self.conversations[agent]
        trajectory = self._empty(agent, ending, seconds)
        trajectory.trained = conversation.train
        conversation.into_trajectory(trajectory)
        trajectory.waited = sum(turn.timings.queued for turn in trajectory.turns)
        trajectory.metrics = dict(self._metrics)
        if not ending.outcome.scored or not trajectory.turns:
            return trajectory
        trajectory.rewards = self._rewards.get(agent, {})
        grouped = any(scorer.kind == ScorerKind.GROUP_REWARD for scorer in self.part.scorers)
        # Group rewards change the sum, so the sum stays unset until they are known.
        if not grouped:
            trajectory.reward = weighted_sum(trajectory.rewards, self.part.scorers)
        return trajectory

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.report_activity(phase.value)
