"""A run of agent programs that never end, to be interrupted: `python -m tests.endpoint.interrupted FILE FOLDER`.

Each program ignores SIGTERM, has a child that left its process group, and has streams that are still being sampled.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from runner import Conversation, Environment, Limits, Task, reward, run
from runner.engines.scripted.script import Latency
from runner.testing import ScriptedEngine

PROGRAMS, STREAMS = 10, 20

AGENT = """
import http.client, json, os, signal, subprocess, sys, threading, time, urllib.parse
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder, streams = sys.argv[1], int(sys.argv[2])
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
tool = {"type": "function", "function": {"name": "run", "description": "", "parameters": {"type": "object"}}}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
streaming = threading.Semaphore(0)
def listen(number):
    connection = http.client.HTTPConnection(url.hostname, url.port)
    body = {"messages": [{"role": "user", "content": f"Number {number}."}], "tools": [tool], "stream": True}
    connection.request("POST", url.path + "/chat/completions", json.dumps(body))
    answer = connection.getresponse()
    answer.readline()
    streaming.release()
    while answer.readline(): pass
for number in range(streams): threading.Thread(target=listen, args=(number,), daemon=True).start()
for _ in range(streams): streaming.acquire()
open(f"{folder}/{os.getpid()}.new", "w").write(f"{os.getpid()} {child.pid}")
os.rename(f"{folder}/{os.getpid()}.new", f"{folder}/{os.getpid()}.pids")
time.sleep(600)
"""


class Endless(Environment):
    """Environment whose program never ends."""

    limits = Limits(seconds=600)

    def tasks(self) -> list[Task]:
        return [Task(id=f"t{number}", prompt="Continue.") for number in range(PROGRAMS)]

    async def rollout(self, conversation: Conversation) -> None:
        async with self.episode.serve() as endpoint:
            await endpoint.run([sys.executable, "-c", AGENT, sys.argv[2], str(STREAMS)])

    @reward
    def right(self) -> Any:
        return True


if __name__ == "__main__":
    engine = ScriptedEngine(
        lambda _: "word " * 1000, chunks=1, tick=0.01, latency=Latency(first=1, between=20), places=PROGRAMS * STREAMS
    )
    run(Endless(), engine, file=Path(sys.argv[1]), quiet=True)
