"""Tool-call episodes compared with verifiers: ours in the engine's process and over a server, theirs over that server.

verifiers and vLLM need different versions of the same libraries. So verifiers gets a virtual environment of its own,
created once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from envs.calculator import Calculator
from runner import Concurrency, Engine, RemoteEngine, Run, Sampling, VllmEngine
from runner.cli.quiet_output import quiet_output
from runner.engines.vllm.parallel import BINDING, cores_by_worker
from runner.models import demo_model
from runner.runs.event_loop import collector_settings, on_event_loop
from tests.benchmarks.figures import Figure, main
from tests.clients.installing import Failed, Install
from tests.clients.programs import SCRIPTS
from tests.engines.remote.model_server import model_server
from tests.repository import ROOT

EPISODE_COUNT = 32
PLACE_COUNT = 8
"""Episodes that are played at once, and requests that the engine runs at once."""
ROUND_COUNT = 3
TURN_COUNT = 6
TURN_TOKENS = 48

# 0.3.1 is the last version with `ToolEnv`, whose episodes are played in the process. openai 3 came later.
PEER = Install("verifiers", ("verifiers==0.3.1", "openai<3"), npm=False, script="")
THEIRS = "verifiers 0.3.1 over the same server"
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": PLACE_COUNT,
    "enforce_eager": True,
    "block_size": 32,
    "max_num_batched_tokens": 512,
    "logprobs_mode": "processed_logprobs",
}
"""Arguments of the engine, both in this process and as a server."""
RETURNS = "{%- if 'return' in function -%}"
"""The part of our template with the return type of a tool. OpenAI's form of a tool has no return type, and so verifiers
has none.
"""

Turns = Sequence[tuple[list[int], list[int]]]
"""For each turn of an episode: the ids of the prompt and the sampled ids."""


class Sums(Calculator):
    """Environment with unconstrained calls, since each side would constrain them by another grammar."""

    tool_choice = "auto"


@dataclass(frozen=True, slots=True)
class Round:
    """All episodes, played once."""

    wall: float
    """Seconds by the clock."""
    processor: float
    """Seconds of processor time of the client's process: engine and server are other processes."""
    right: float
    """Number of episodes with the correct answer."""
    episodes: Sequence[Turns]
    """The ids of every episode."""

    @property
    def turns(self) -> int:
        return sum(map(len, self.episodes))

    @property
    def sampled(self) -> int:
        return sum(len(sampled) for turns in self.episodes for _, sampled in turns)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to play."""

    warm: Round
    """A first round, at temperature 1. Only its ids are compared."""
    rounds: list[Round]
    """The measured rounds, at temperature 0, at which all ways sample alike."""


def continuing(episodes: Sequence[Turns]) -> tuple[int, int]:
    """Return how many prompts continue an episode, and how many of these lack the earlier prompt's or turn's ids."""
    pairs = [pair for turns in episodes for pair in pairwise(turns)]
    return len(pairs), sum(
        prompt[: len(before) + len(sampled)] != [*before, *sampled] for (before, sampled), (prompt, _) in pairs
    )


def measure() -> Iterator[Figure]:
    """Tool-call episodes: in the engine's process, over a server, and with verifiers over that server."""
    # Otherwise the server would leave one core of each pair idle, and the engine in our process would not.
    os.environ.setdefault(BINDING, cores_by_worker(1, os.sched_getaffinity(0)))
    if why := install():
        print(why, file=sys.stderr, flush=True)
    with TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(_template(), encoding="utf-8")
        with quiet_output(Path(folder) / "vllm.log"):
            ways = {"in process": on_event_loop(_in_process, template)}
            ways |= _over_a_server(template, beside_verifiers=not why)
    same_prompts(ways)
    yield from figures(ways)


def figures(ways: dict[str, Way]) -> Iterator[Figure]:
    """Figures of each way to play."""
    for way, of in ways.items():
        played = of.rounds
        yield Figure(
            f"{EPISODE_COUNT} episodes, {way}", "episodes/s", _each(played, lambda each: EPISODE_COUNT / each.wall)
        )
        yield Figure("  turns", "turns/s", _each(played, lambda each: each.turns / each.wall))
        yield Figure("  by the clock", "s", _each(played, lambda each: each.wall))
        yield Figure("  processor time of the client", "s", _each(played, lambda each: each.processor))
        yield Figure("    of a turn", "ms", _each(played, lambda each: 1e3 * each.processor / each.turns))
        yield Figure("  turns in all", "turns", _each(played, lambda each: each.turns))
        yield Figure("  ids sampled", "ids", _each(played, lambda each: each.sampled))
        yield Figure("  right answers", "episodes", _each(played, lambda each: each.right))
        for temperature, counted in ((0, played), (1, [of.warm])):
            prompts = [continuing(each.episodes) for each in counted]
            name = f"  prompts that continue, temperature {temperature}"
            yield Figure(name, "prompts", tuple(count for count, _ in prompts))
            yield Figure("    with other ids than were there", "prompts", tuple(broken for _, broken in prompts))


def same_prompts(ways: dict[str, Way]) -> None:
    """Raise an error if episodes begin with different prompts."""
    first = {
        way: [sorted(turns[0][0] for turns in each.episodes) for each in (of.warm, *of.rounds)]
        for way, of in ways.items()
    }
    (way, [expected, *_]), *_ = first.items()
    for other, prompts in first.items():
        if any(each != expected for each in prompts):
            raise RuntimeError(f"episodes begin with other prompts {other} than {way}: they cannot be compared.")


def install() -> str:
    """Install verifiers if it is missing. Return the reason why it cannot be installed, or ""."""
    if PEER.missing:
        try:
            PEER.install()
        except Failed as error:
            return f"{' '.join(PEER.packages)} could not be installed, and is left out: {error}"
    return ""


async def _in_process(template: Path) -> Way:
    async with VllmEngine(template=template, **ENGINE) as engine:
        way = Way(await _round(engine, 1), [])
        for _ in range(ROUND_COUNT):
            await engine.vllm.llm.reset_prefix_cache()
            way.rounds.append(await _round(engine, 0))
        return way


def _over_a_server(template: Path, *, beside_verifiers: bool) -> dict[str, Way]:
    """Play the ways in turn, so that rising load on the machine favours neither."""
    arguments = ["--chat-template", str(template), "--enable-auto-tool-choice", "--tool-call-parser", "pythonic"]
    with model_server(demo_model(), template.with_name("server.log"), *_options(), *arguments) as server:

        def ours(temperature: float) -> Round:
            return on_event_loop(_over_server, server.url, template, temperature)

        with _peer(server.url, str(server.folder), template.with_name("verifiers.log")) as theirs:
            plays = {"over a server": ours} | ({THEIRS: theirs} if beside_verifiers else {})
            ways = {way: Way(play(1), []) for way, play in plays.items()}
            for number in range(ROUND_COUNT):
                for way, play in list(plays.items())[:: -1 if number % 2 else 1]:
                    _forget_prefixes(server.url)
                    ways[way].rounds.append(play(0))
    return ways


async def _over_server(url: str, template: Path, temperature: float) -> Round:
    async with RemoteEngine(url, template=template) as engine:
        return await _round(engine, temperature)


async def _round(engine: Engine, temperature: float) -> Round:
    sampling, concurrency = Sampling(max_tokens=TURN_TOKENS, temperature=temperature), Concurrency(episodes=PLACE_COUNT)
    async with Run(Sums(EPISODE_COUNT), engine, sampling=sampling, concurrency=concurrency) as run:
        with collector_settings():
            began = time.process_time(), time.perf_counter()
            trajectories = [trajectory async for trajectory in run]
            processor, wall = time.process_time() - began[0], time.perf_counter() - began[1]
    return Round(
        wall,
        processor,
        sum(each.rewards["exact"] or 0.0 for each in trajectories),
        [[(list(turn.prompt_ids), list(turn.token_ids)) for turn in each.turns] for each in trajectories],
    )


@contextmanager
def _peer(url: str, model: str, log: Path) -> Iterator[Callable[[float], Round]]:
    """verifiers in a process of its own, which starts at its first round."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [PEER.program("python"), "-P", str(SCRIPTS / "verifiers_tools.py")]
    given = {
        "url": url,
        "model": model,
        "rows": list(_rows()),
        "turns": TURN_COUNT,
        "concurrency": PLACE_COUNT,
        # Trainers request ids and log-probabilities, which our turns always contain.
        "sampling": {"max_tokens": TURN_TOKENS, "logprobs": True, "extra_body": {"return_token_ids": True}},
    }
    processes: list[subprocess.Popen[str]] = []

    def play(temperature: float) -> Round:
        if not processes:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, env=environment, text=True
                )
            processes.append(process)
            print(json.dumps(given), file=process.stdin, flush=True)
        (process,) = processes
        assert process.stdout is not None
        print(json.dumps({"temperature": temperature}), file=process.stdin, flush=True)
        if not (line := process.stdout.readline()):
            raise RuntimeError(f"verifiers ended:\n{log.read_text(errors='replace')[-3000:]}")
        return Round(**json.loads(line))

    try:
        yield play
    finally:
        for process in processes:
            with process:
                process.kill()


def _rows() -> Iterator[dict[str, Any]]:
    """The same tasks as rows of a data set: messages in the form of OpenAI's API, and the answer."""
    for task in (environment := Sums(EPISODE_COUNT)).tasks():
        environment.task = task
        messages: list[dict[str, Any]] = [{"role": "system", "content": environment.system_prompt}]
        for message in environment.prompt():
            calls = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in message.get("tool_calls", ())
            ]
            messages.append({**message, **({"tool_calls": calls} if calls else {})})
        yield {"prompt": messages, "answer": task.answer}


def _template() -> str:
    text = (ROOT / "templates" / "pythonic.jinja").read_text(encoding="utf-8")
    if RETURNS not in text:
        raise RuntimeError(f"templates/pythonic.jinja has no {RETURNS}: the prompts of both sides would differ.")
    return text.replace(RETURNS, "{%- if false -%}")


def _options() -> Iterator[str]:
    """The engine's arguments in the form of the server's command line."""
    for name, value in ENGINE.items():
        yield f"--{name.replace('_', '-')}"
        if value is not True:
            yield str(value)


def _forget_prefixes(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", method="POST"), timeout=60):
        pass


def _each(rounds: Sequence[Round], value: Callable[[Round], float]) -> tuple[float, ...]:
    return tuple(map(value, rounds))


if __name__ == "__main__":
    main(measure)
