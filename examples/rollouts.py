"""An asynchronous script for tool-use rollouts: many episodes at once, each trajectory as soon as it is finished."""

import anyio

from envs.calculator import Calculator
from runner import Engine, Run, Sampling, Trajectory, VllmEngine


async def main(engine: Engine) -> list[Trajectory]:
    trajectories = []
    async with Run(Calculator(questions=16), engine, sampling=Sampling(temperature=0)) as run:
        async for trajectory in run:
            log = trajectory.segments[0].log
            print(
                f"{trajectory.id}: reward {trajectory.reward}, {len(trajectory.turns)} turns, "
                f"{len(log)} ids of which {sum(log.mask())} are trained on"
            )
            trajectories.append(trajectory)
    print(f"mean reward {run.summary.reward.mean:.2f}")
    return trajectories


if __name__ == "__main__":  # vLLM starts processes of its own, which import this file
    anyio.run(main, VllmEngine("smollm2-135m"))
