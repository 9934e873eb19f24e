"""Use of groups by a trainer: advantages from the rewards of the episodes of one task."""

import statistics

import anyio

from envs.calculator import Calculator
from runner import Concurrency, Engine, Run, VllmEngine


async def main(engine: Engine) -> list[tuple[str, list[float]]]:
    advantages = []
    run = Run(Calculator(questions=4), engine, group_size=4, seed=7, concurrency=Concurrency(episodes=16))
    async with run:
        async for group in run.groups():
            # A failed episode has no reward. It is left out and does not count as 0.
            rewards = [t.reward for t in group.trajectories if t.reward is not None]
            if not rewards:
                continue  # every episode failed
            mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
            advantages.append((group.task.id, [(reward - mean) / (spread + 1e-3) for reward in rewards]))
            print(group.task.id, "rewards", rewards)
    return advantages


if __name__ == "__main__":  # vLLM starts processes of its own, which import this file
    anyio.run(main, VllmEngine("smollm2-135m"))
