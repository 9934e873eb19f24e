"""verifiers' own `EnvClient`: plays with a server at the given address, and prints one line of JSON.

It is a process of its own, like a trainer.

usage: python verifiers_client.py ADDRESS BASE_URL MODEL FOLDER-OF-THE-TASK-SET
"""

import asyncio
import contextlib
import itertools
import json
import sys

from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.configs.taskset import TasksetConfig
from verifiers.v1.serve import EnvClient
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_taskset


async def main(address, base_url, model, folder):
    sys.path.insert(0, folder)
    client = EnvClient(address)
    await client.wait_for_server_startup(60)
    config = TrainClientConfig(base_url=base_url)
    salts = itertools.count()

    def run(data, **changes):
        # prime-rl sends a salt for each weight version. Here there are more salts than players that the server keeps.
        sampling = SamplingConfig(temperature=1.0, max_tokens=40, cache_salt=str(next(salts)))
        return client.run(**{"client": config, "model": model, "sampling": sampling, "task_data": data, **changes})

    episodes = await asyncio.gather(*(run({"id": f"t{n}", "prompt": f"Add {n}.", "answer": "3"}) for n in range(8)))
    again = [await run({"id": "t0", "prompt": "Add 0.", "answer": "3"}) for _ in range(3)]
    tasks = list(load_taskset(TasksetConfig(id="weather-tasks")))
    own = await asyncio.gather(*(run(json.loads(task.data.model_dump_json())) for task in tasks))
    failed = await run({"id": "t8", "prompt": "fail", "answer": "3"})
    refused = []
    for changes in ({"client": EvalClientConfig(base_url=base_url)}, {"task_data": {}}):
        try:
            await run({"prompt": "x"}, **changes)
        except RuntimeError as error:
            refused.append(str(error))
    waiting = asyncio.create_task(run({"id": "t9", "prompt": "wait", "answer": "3"}))
    await asyncio.sleep(0.5)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    healthy = await client.health()
    await client.close()
    branches = [branch for episode in episodes for trace in episode.traces for branch in trace.branches]
    print(
        json.dumps(
            {
                "ok": [episode.ok for episode in episodes],
                "rewards": [trace.reward for episode in episodes for trace in episode.traces],
                "prompts": [trace.nodes[0].message.content for episode in episodes for trace in episode.traces],
                "turns": [episode.num_turns for episode in episodes],
                "output_tokens": [episode.num_output_tokens for episode in episodes],
                "trained": [sum(branch.sampled_mask) for branch in branches],
                "aligned": [
                    len(branch.token_ids) == len(branch.sampled_mask) == len(branch.logprobs) for branch in branches
                ],
                "trainable": [trace.agent.trainable for episode in episodes for trace in episode.traces],
                "failed": {"ok": failed.ok, "errors": [error.message for error in failed.errors]},
                "refused": refused,
                "own": [trace.nodes[0].message.content for episode in own for trace in episode.traces if episode.ok],
                "again": [trace.info["episode"] for episode in again for trace in episode.traces],
                "ids": [trace.id for episode in [*episodes, *again] for trace in episode.traces],
                "healthy": healthy,
                "records": [json.loads(episode.model_dump_json(exclude_none=True)) for episode in episodes],
            }
        )
    )


asyncio.run(main(*sys.argv[1:]))
