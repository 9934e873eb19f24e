"""Exactness on the real engine: awkward turns in episodes, compared with vLLM's prompts and Hugging Face's scores.

The engine computes in float32, so that log-probabilities can be compared. It is the engine of docs/forced-ids.md.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import (
    Conversation,
    Environment,
    FinishReason,
    Message,
    Outcome,
    Run,
    Sampling,
    Task,
    Trajectory,
    Turn,
    VllmEngine,
    reward,
    tool,
)
from runner.engines.base import Engine, GenerationRequest
from runner.errors import RequestRejected
from runner.testing import assert_exact, force
from runner.tokens.junction import Close, Result
from tests.repository import DOCS

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

PAGE = DOCS / "forced-ids.md"
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
NAMES: dict[str, Any] = {"__name__": "page"}
exec(compile(EXAMPLE, str(PAGE), "exec"), NAMES)


class OfSmallModel(VllmEngine):
    """The engine of the page, with the small model: no test here needs text that the model chooses."""

    folder: Path

    def __init__(self, model: str, **options: Any) -> None:
        assert model == "smollm2-135m"
        super().__init__(self.folder, template="pythonic", **options)


NAMES["VllmEngine"] = OfSmallModel


@pytest.fixture(scope="module", autouse=True)
def model_of_the_page(small_model_folder: Path) -> None:
    OfSmallModel.folder = small_model_folder


anyio_backend, forcible = NAMES["anyio_backend"], NAMES["forcible"]  # fixtures of the page
bytewise: Callable[[VllmEngine, str], list[int]] = NAMES["bytewise"]

START, STOP, END_OF_TEXT = 1, 2, 0
SMILE = "\N{SLIGHTLY SMILING FACE}"
TOLERANCE_NATS = 1e-3  # the two implementations were measured to differ by 4e-5

Teacher = Callable[[Sequence[int]], list[float]]


@pytest.mark.whole
async def test_the_example_of_the_page_passes(forcible: VllmEngine) -> None:
    assert forcible.stop_ids == (STOP,)
    await NAMES["test_a_call_in_unusual_pieces_is_run"](forcible)


@dataclass(frozen=True)
class Said:
    """One turn as it is forced, and its expected result."""

    ids: list[int]
    """The sampled ids."""
    cut: bool = False
    """True if it ends at its length limit."""
    answered: bool = True
    """True if the environment adds a message; otherwise the next turn continues this one."""
    called: tuple[str, ...] = ()
    """The names of the calls that are read in the turn."""
    owed: str = "\n"
    """The rest of the turn's close, which the template writes."""


def awkward(engine: VllmEngine) -> list[Said]:
    """Return turns with ids that no tokenizer would produce, or that no template would write back."""
    encode, smile = engine.tokenizer.encode, bytewise(engine, SMILE)
    accent = bytewise(engine, "\N{LATIN SMALL LETTER E WITH ACUTE}")[0]
    return [
        # Each byte is an id of its own.
        Said([*bytewise(engine, "[add(a=17, b=25)]"), STOP], called=("add",)),
        # Canonical ids of a text that the template writes differently.
        Said([*encode(r"""[ note( text = 'it\'s\t\u00e9 "q" \\',weight = 1e-7 ,) ]"""), STOP], called=("note",)),
        Said(
            [*encode("Let me see.\n\n"), *bytewise(engine, "[add(a=1,b=2),add( b=4, a=3)]"), STOP], called=("add",) * 2
        ),
        # Control text in ordinary characters, and control ids that end nothing.
        Said([*bytewise(engine, "<|im_end|>\n<|im_start|>user\nNo. "), START, END_OF_TEXT, STOP]),
        # A character that is divided by the cut end of a turn, and half a character before the stop.
        Said([*encode("So be it "), *smile[:2]], cut=True, answered=False),
        Said([*smile[2:], *bytewise(engine, " or not "), accent, STOP]),
        # A call that is never closed, and a call that was cut just before its close.
        Said([*encode("[add(a=1, b="), STOP], called=("add",)),
        Said(encode("[add(a=1, b=2)"), cut=True, called=("add",), owed="<|im_end|>\n"),
        Said([*encode("Done.\n\n"), STOP], answered=False),
    ]


class Notebook(Environment):
    """Environment that generates the given turns in order, with real tools."""

    def __init__(self, turns: Sequence[Said]) -> None:
        self.said = turns

    def tasks(self) -> list[Task]:
        return [Task(id="awkward", prompt="Keep my notes, please.")]

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @tool
    def note(self, text: str, weight: float = 1.0) -> str:
        """Keep a note."""
        return f"kept {text!r} at {weight!r}"

    def step(self, turn: Turn) -> str:
        return f"Go on after {turn.text[-4:]!r}."

    async def rollout(self, conversation: Conversation) -> None:
        for said in self.said:
            longest = len(said.ids) + (not said.cut)
            turn = await conversation.generate(sampling=Sampling(max_tokens=longest))
            if said.answered:
                reply = await self.episode.answer(turn)
                assert reply is not None
                conversation.add(reply)

    @reward
    def played(self) -> bool:
        return len(self.episode.turns) == len(self.said)


@contextmanager
def watched(engine: VllmEngine) -> Iterator[list[list[int]]]:
    """Record the prompt ids of each request that reaches vLLM."""
    prompts: list[list[int]] = []
    add_request = engine.vllm.llm.add_request

    async def record(name: str, prompt: Any, parameters: Any, **named: Any) -> Any:
        prompts.append(list(prompt["prompt_token_ids"]))
        return await add_request(name, prompt, parameters, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.vllm.llm, "add_request", record)
        yield prompts


async def play(engine: Engine, said: Sequence[Said], *, stop_ids: tuple[int, ...] | None = None) -> Trajectory:
    forced = force(engine, [turn.ids for turn in said])
    forced.stop_ids = stop_ids or engine.stop_ids
    async with Run(Notebook(said), forced) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    assert trajectory.reward == 1
    assert_exact(trajectory, forced)
    return trajectory


def added(messages: Sequence[Message]) -> Iterator[str]:
    """Return ChatML's text of each run of messages that was added to the prompt, without the first run."""
    runs = [
        list(run) for spoken, run in groupby(messages, lambda message: message["role"] == "assistant") if not spoken
    ]
    for run in runs[1:]:
        turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in run]
        yield "".join(turns) + "<|im_start|>assistant\n"


def assert_sent(
    engine: VllmEngine, trajectory: Trajectory, said: Sequence[Said], sent: Sequence[Sequence[int]]
) -> None:
    """Assert that every prompt at vLLM is the earlier prompt, its forced ids, and the template's text after them."""
    block = engine.describe()["chosen"]["block_size"]
    assert len(trajectory.segments) == 1
    assert len(sent) == len(trajectory.turns) == len(said)
    between = added(trajectory.messages)
    for n, (turn, prompt, forced) in enumerate(zip(trajectory.turns, sent, said, strict=True)):
        assert list(turn.prompt_ids) == prompt
        assert list(turn.token_ids) == forced.ids
        assert turn.finish is (FinishReason.LENGTH if forced.cut else FinishReason.STOP)
        if n == 0:
            continue
        history, before = [*sent[n - 1], *said[n - 1].ids], said[n - 1]
        bridge = engine.tokenizer.encode(before.owed + next(between)) if before.answered else []
        assert prompt == [*history, *bridge]
        # The engine's own counter is evidence: the cache had every full block of the ids before this turn.
        assert turn.cached_tokens == (len(history) - 1) // block * block
        if bridge:
            assert turn.junction is not None
            assert (turn.junction.result, turn.junction.inserted) == (Result.APPENDED, len(bridge))
    assert next(between, None) is None


@dataclass(frozen=True)
class WatchedEpisode:
    """An episode, and the prompts that vLLM received for it."""

    trajectory: Trajectory
    sent: list[list[int]]


@pytest.fixture(scope="module")
async def awkward_episode(forcible: VllmEngine) -> WatchedEpisode:
    """The awkward turns, played once for all tests that read them."""
    with watched(forcible) as sent:
        return WatchedEpisode(await play(forcible, awkward(forcible)), sent)


async def test_awkward_turns_reach_the_engine_unchanged(forcible: VllmEngine, awkward_episode: WatchedEpisode) -> None:
    said, trajectory = awkward(forcible), awkward_episode.trajectory
    assert_sent(forcible, trajectory, said, awkward_episode.sent)

    turns = trajectory.turns
    assert [tuple(call.name for call in turn.tool_calls) for turn in turns] == [turn.called for turn in said]
    errors = [[call.error for call in turn.tool_calls if call.error] for turn in turns]
    assert [bool(error) for error in errors] == [False] * 6 + [True] * 2 + [False]
    assert turns[1].tool_calls[0].arguments == {"text": 'it\'s\t\u00e9 "q" \\', "weight": 1e-7}
    assert [message["content"] for message in trajectory.messages if message["role"] == "tool"] == [
        "42",
        "kept 'it\\'s\\té \"q\" \\\\' at 1e-07",
        "3",
        "7",
    ]
    assert turns[3].text == "<|im_end|>\n<|im_start|>user\nNo. <|im_start|><|endoftext|>"
    assert (turns[4].text, turns[5].text) == ("So be it \N{REPLACEMENT CHARACTER}", f"So be it {SMILE} or not \ufffd")
    # The runner closes a cut turn with masked ids. The other turns sampled their close.
    closes = [turn.junction and turn.junction.close for turn in turns]
    assert closes == [None, *[Close.SAMPLED] * 4, None, Close.SAMPLED, Close.SAMPLED, Close.MASKED]


async def test_text_after_the_close_stays_and_is_not_repeated(
    forcible: VllmEngine,
) -> None:
    encode = forcible.tokenizer.encode
    newline = encode("\n")
    said = [
        Said([*encode("It is so."), STOP, *newline, END_OF_TEXT], owed=""),
        Said([*encode("It is not."), STOP, *newline], cut=True, owed=""),
        Said([*encode("Bye."), STOP, END_OF_TEXT], answered=False),
    ]
    # As for a model whose turns end with <|endoftext|>, and which was trained to write its template's close before it.
    with watched(forcible) as sent:
        trajectory = await play(forcible, said, stop_ids=(END_OF_TEXT,))
    assert_sent(forcible, trajectory, said, sent)


@pytest.fixture(scope="module")
def teacher(hugging_face_model: Any) -> Teacher:
    """Return a function for Hugging Face's log-probability of each id in float32, with NaN for the first id."""
    import torch

    def logprobs(ids: Sequence[int]) -> list[float]:
        sequence = torch.tensor([list(ids)])
        with torch.inference_mode():
            rows = hugging_face_model(sequence).logits[0, :-1].float().log_softmax(-1)
        return [math.nan, *rows.gather(1, sequence[0, 1:, None])[:, 0].tolist()]

    return logprobs


@dataclass(frozen=True)
class Deviation:
    """Differences of a sequence from the sampled sequence."""

    unaligned: int
    """The number of sampled ids that the sequence lacks."""
    largest: float
    """The largest difference in nats between log-probabilities of a sampled id that the sequence has."""


def deviation(trajectory: Trajectory, ids: Sequence[int], teacher: Teacher) -> Deviation:
    """Compare the stored log-probabilities with the teacher's on `ids`, aligned by the longest common blocks."""
    log = trajectory.segments[0].log
    expected = teacher(ids)
    blocks = SequenceMatcher(None, list(log.ids), list(ids), autojunk=False).get_matching_blocks()
    pairs = [(block.a + n, block.b + n) for block in blocks for n in range(block.size)]
    mask = log.mask()
    differences = [abs(log.logprobs[ours] - expected[theirs]) for ours, theirs in pairs if mask[ours]]
    return Deviation(sum(mask) - len(differences), max(differences))


def rendered(engine: VllmEngine, messages: Sequence[Message], tools: Sequence[Any]) -> array[int]:
    """Return the ids of the messages after rendering and encoding them again, which a run must never do."""
    text = engine.template.renderer().render(messages, tools=tools, generation_prompt=False)
    return array("i", engine.tokenizer.encode(text))


async def test_stored_logprobs_match_the_exact_sequence_only(
    forcible: VllmEngine, awkward_episode: WatchedEpisode, teacher: Teacher
) -> None:
    trajectory = awkward_episode.trajectory
    (segment,) = trajectory.segments
    exact = deviation(trajectory, segment.log.ids, teacher)
    assert exact.unaligned == 0
    assert exact.largest < TOLERANCE_NATS

    again = rendered(forcible, segment.messages, segment.tools)
    assert again[: trajectory.turns[0].start] == segment.log.ids[: trajectory.turns[0].start]
    assert again != segment.log.ids
    other = deviation(trajectory, again, teacher)
    assert other.unaligned > 0
    assert other.largest > TOLERANCE_NATS


async def test_even_a_single_split_token_is_seen_in_the_log_probabilities(
    forcible: VllmEngine, teacher: Teacher
) -> None:
    encode = forcible.tokenizer.encode
    whole = encode(" Hello there, my friend.")
    split = [*bytewise(forcible, " Hello"), *whole[1:]]
    assert forcible.tokenizer.decode(split) == forcible.tokenizer.decode(whole)
    said = [Said([*split, STOP]), Said([*encode("Bye."), STOP], answered=False)]
    trajectory = await play(forcible, said)
    (segment,) = trajectory.segments
    assert deviation(trajectory, segment.log.ids, teacher).largest < TOLERANCE_NATS
    other = deviation(trajectory, rendered(forcible, segment.messages, segment.tools), teacher)
    assert (other.unaligned > 0, other.largest > TOLERANCE_NATS) == (True, True)


def request(name: str, length: int, forced: Sequence[int] | None = None) -> GenerationRequest:
    """Return a greedy request with a prompt of its own, and without stop ids, so that it has `length` ids."""
    sampling = replace(Sampling.defaults(), max_tokens=length, temperature=0.0)
    prompt = [4000 + ord(name[0]) + index for index in range(24)]
    extra = {} if forced is None else {"force": list(forced)}
    return GenerationRequest(name=name, prompt=prompt, sampling=sampling, acts_on_deltas=True, extra=extra)


async def sampled(
    engine: Engine, wanted: GenerationRequest, opened: list[int] | None = None
) -> tuple[list[int], list[float]]:
    """Return the ids and log-probabilities of a request. `opened` gets the number of open requests at each delta."""
    ids: list[int] = []
    logprobs: list[float] = []
    async with engine.stream(wanted) as stream:
        async for delta in stream:
            ids.extend(delta.token_ids)
            logprobs.extend(delta.logprobs or ())
            if opened is not None:
                opened.append(engine.stats().open)
    return ids, logprobs


async def test_forced_requests_leave_the_others_of_their_batch_alone(forcible: VllmEngine, teacher: Teacher) -> None:
    free = [request(name, 16) for name in ("free", "other")]
    alone = [await sampled(forcible, wanted) for wanted in free]
    # Requests that end early free places in the batch, into which others move.
    forced = [request(f"{number}", 9 + 2 * number, range(600, 609 + 2 * number)) for number in range(4)]
    partly = request("partly", 12, [700, 701, 702])
    mixed = [forced[0], free[0], forced[1], forced[2], free[1], partly, forced[3]]

    together: dict[str, tuple[list[int], list[float]]] = {}
    opened: list[int] = []

    async def keep(wanted: GenerationRequest) -> None:
        together[wanted.name] = await sampled(forcible, wanted, opened)

    async with anyio.create_task_group() as group:
        for wanted in mixed:
            group.start_soon(keep, wanted)
    assert max(opened) == len(mixed)  # the scheduler's own count

    for wanted, (ids, logprobs) in zip(free, alone, strict=True):
        assert together[wanted.name][0] == ids
        assert together[wanted.name][1] == pytest.approx(logprobs, abs=TOLERANCE_NATS)
    for wanted in forced:
        ids, logprobs = together[wanted.name]
        assert ids == wanted.extra["force"]
        assert logprobs == pytest.approx(teacher([*wanted.prompt, *ids])[len(wanted.prompt) :], abs=TOLERANCE_NATS)
    ids, _ = together["partly"]
    assert ids[:3] == [700, 701, 702]
    # After the forced ids the model is free, and samples its most likely id each time.
    prefix = replace(request("partly", 9), prompt=[*partly.prompt, 700, 701, 702])
    assert (await sampled(forcible, prefix))[0] == ids[3:]


@pytest.mark.parametrize("ids", ["text", [1, -1], [1.5], 7, [True]], ids=repr)
async def test_bad_forced_ids_fail_one_vllm_request_and_not_the_next(forcible: VllmEngine, ids: Any) -> None:
    wanted = replace(request("bad", 4), extra={"force": ids})
    with pytest.raises(RequestRejected, match="give a list of token ids"):
        await sampled(forcible, wanted)
    assert len((await sampled(forcible, request("good", 4)))[0]) == 4


async def test_an_id_past_the_vocabulary_of_the_model_is_refused(forcible: VllmEngine) -> None:
    size = forcible.vocabulary
    last = force(forcible, [[size - 1]])
    assert (await sampled(last, request("e/main/0", 1)))[0] == [size - 1]
    with pytest.raises(RequestRejected, match=f"{size} cannot be forced: the model's ids are 0 to {size - 1}"):
        await sampled(force(forcible, [[size]]), request("e/main/0", 1))


async def test_a_constrained_turn_is_not_forced(forcible: VllmEngine) -> None:
    class Constrained(Notebook):
        tool_choice = "required"

    said = [Said([*forcible.tokenizer.encode("[add(a=1, b=2)]"), STOP])]
    async with Run(Constrained(said), force(forcible, [said[0].ids])) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "its ids cannot be forced, as it is constrained" in trajectory.error
