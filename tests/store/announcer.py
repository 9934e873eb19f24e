"""A process for test_faults.py that commits episodes at once, and prints each id after its commit.

Usage: announcer.py FILE EPISODES AT_ONCE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio

from runner.store.writer import RunWriter
from tests.store.building import header, played


async def announce(path: Path, episodes: int, at_once: int) -> None:
    async with RunWriter(path, header(group_size=episodes)) as writer:
        claimed = writer.claim(played().task, 0)
        left = iter([index for index in range(episodes) if index not in claimed.finished])

        async def play() -> None:
            for index in left:
                trajectory = played(index=index, turns=4)
                await writer.commit_episode([trajectory, played(index=index, agent="user", trained=False)])
                os.write(1, f"{index}\n".encode())

        async with anyio.create_task_group() as group:
            for _ in range(at_once):
                group.start_soon(play)
        await writer.finish({})


if __name__ == "__main__":
    anyio.run(announce, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
