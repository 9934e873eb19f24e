"""The fixture scripted_engine: enqueued replies are sampled, cut and delayed as requested, and none is lost."""

from __future__ import annotations

from typing import Any, cast

import pytest

from runner import BadOption, Environment, Limits, Task, Turn, reward, tool
from runner.testing import (
    AwkwardTokenizer,
    Fault,
    Latency,
    PlainTokenizer,
    QueuedEngine,
    Reply,
    VirtualClock,
    assert_exact,
    call,
    inside,
    play,
)
from runner.testing.chunking import Inside
from tests.testing.inner import run

pytest_plugins = ["pytester"]


class Talks(Environment):
    """Environment that continues while turns end in three dots."""

    limits = Limits(seconds=60)

    def tasks(self) -> list[Task]:
        return [Task(id="t", prompt="Say something.")]

    def step(self, turn: Turn) -> str | None:
        return "Continue." if turn.text.endswith("...") else None

    @tool
    def f(self, a: int) -> int:
        """Give it back."""
        return a

    @reward
    def spoke(self) -> bool:
        return bool(self.episode.text)


def test_calls_keep_the_exact_ids_and_prompts_their_text(scripted_engine: QueuedEngine) -> None:
    scripted_engine.say("one ...", [ord("x")])
    trajectory = play(Talks, scripted_engine)
    assert [call.prompt for call in scripted_engine.calls] == [turn.prompt_ids for turn in trajectory.turns]
    assert scripted_engine.prompts[1].startswith(scripted_engine.prompts[0] + "one ...<|im_end|>")


def test_default_reply_is_used_when_the_queue_is_empty(scripted_engine: QueuedEngine) -> None:
    scripted_engine.always("end").say("one ...", "two ...")
    assert [turn.text for turn in play(Talks, scripted_engine).turns] == ["one ...", "two ...", "end"]


def test_cleared_replies_are_not_reported_as_unused(scripted_engine: QueuedEngine) -> None:
    scripted_engine.say("never").clear()
    assert scripted_engine.leftovers() == ""


def test_virtual_delays_take_no_time_and_limits_fire_in_them(virtual_clock: VirtualClock) -> None:
    engine = QueuedEngine(tick=1.0).say("a word", latency=Latency(first=50)).say("another", latency=Latency(first=70))
    assert play(Talks, engine, clock=virtual_clock).outcome == "completed"
    assert 50 <= virtual_clock.now < 60
    trajectory = play(Talks, engine, clock=virtual_clock)
    assert (trajectory.outcome, trajectory.limit) == ("time_limit", "seconds")


@pytest.mark.parametrize(
    ("said", "piece", "cuts"),
    [
        ("aéb", "", [2]),
        ("日本", "", [1, 4]),
        ("x<think>y<think>", "<think>", [4, 12]),
        ("hello", "ell", [2]),
    ],
    ids=["two bytes", "three bytes each", "every marker", "a word"],
)
def test_a_reply_is_cut_inside_a_piece(said: str, piece: str, cuts: list[int]) -> None:
    tokenizer = PlainTokenizer()
    ids = tokenizer.encode(said)
    sizes = inside(piece).sizes(ids, tokenizer)
    ends = [sum(sizes[: count + 1]) for count in range(len(sizes))]
    assert ends == [*cuts, len(ids) + 1]


def test_turn_is_the_same_for_every_way_of_chunking(scripted_engine: QueuedEngine) -> None:
    ways: list[Any] = [1, 3, (1, 2), "whole", "random", inside(), inside("[f("), None]
    for chunks in ways:
        scripted_engine.say(Reply("é日", calls=[call("f", a=1)]), chunks=chunks)
        scripted_engine.say("bye")
    for _ in ways:
        trajectory = play(Talks, scripted_engine)
        assert (trajectory.turns[0].text, trajectory.turns[0].tool_calls[0].name) == ("é日", "f")


def test_bytes_that_are_not_text_are_cut_inside_the_piece() -> None:
    tokenizer = PlainTokenizer()
    assert inside("ab").sizes([0xFF, 0xFE, ord("a"), ord("b")], tokenizer) == (3, 2)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda engine: engine.say(), "give a reply"),
        (lambda engine: engine.say(5), "5 is not a reply"),
        (lambda engine: engine.always([]), "is not a reply"),
        (lambda engine: engine.say("abc", chunks=0), "chunks=0: give a size of at least 1"),
        (lambda engine: engine.say("abc", chunks=inside("x")), r"inside\('x'\): 'x' does not occur in 'abc'"),
        (lambda engine: engine.say("abc", chunks=inside()), "a multi-byte character does not occur"),
        (lambda engine: engine.say("abc", chunks=inside("b")), "a single token id in this vocabulary"),
        (lambda engine: engine.say("<|im_end|>", chunks=inside("<|im_end|>")), "a single token id"),
        (lambda engine: engine.say("abc", chunks=inside(cast("Any", 5))), r"inside\(5\): give a piece of the text"),
    ],
    ids=["nothing", "a number", "an empty list", "no size", "no such piece", "ascii", "a byte", "a control token", "5"],
)
def test_impossible_reply_is_refused_at_the_line_of_the_call(mistake: Any, message: str) -> None:
    with pytest.raises(BadOption, match=message) as caught:
        mistake(QueuedEngine())
    assert not [entry for entry in caught.traceback.filter(caught) if "/runner/" in str(entry.path)]


def test_impossible_cut_of_a_functions_reply_fails_at_its_turn(scripted_engine: QueuedEngine) -> None:
    scripted_engine.say(lambda asked: "abc", chunks=Inside("x"))
    with pytest.raises(AssertionError, match=r"^t#0/main/0: inside\('x'\): 'x' does not occur"):
        play(Talks, scripted_engine)


def test_fault_happens_to_the_reply_that_it_was_given_with(scripted_engine: QueuedEngine) -> None:
    scripted_engine.say("lost", fault=Fault.error(at=1)).say("kept")
    trajectory = play(Talks, scripted_engine)
    assert (trajectory.text, trajectory.attempt) == ("kept", 1)


def test_reply_in_an_awkward_vocabulary_has_ids_unlike_its_encoding() -> None:
    tokenizer = AwkwardTokenizer()
    engine = QueuedEngine(tokenizer=tokenizer).say("It is the end ...", "assistant")
    trajectory = play(Talks, engine)
    sampled = trajectory.turns[0].token_ids
    assert tokenizer.encode(tokenizer.decode(sampled)) != list(sampled)
    assert_exact(trajectory, engine)


LEFT = """
def test_left(scripted_engine):
    scripted_engine.say("42", call("multiply", a=6, b=7), [1, 2], lambda asked: "x")
    play(Calculator, scripted_engine)
"""


def test_unused_replies_fail_the_test_and_are_listed(pytester: pytest.Pytester) -> None:
    result = run(pytester, LEFT)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        [
            "3 replies were never used:",
            "  main: multiply(a=6, b=7)",
            "  main: the ids [[]1, 2[]]",
            "  main: the function test_left.<locals>.<lambda>",
            "*or forget them with scripted_engine.clear().",
        ]
    )


def test_failed_test_has_no_second_error_for_unused_replies(pytester: pytest.Pytester) -> None:
    run(pytester, LEFT + "    assert False").assert_outcomes(failed=1)


def test_a_problem_that_no_play_raised_fails_the_test(pytester: pytest.Pytester) -> None:
    test = """
@pytest.mark.anyio
async def test_by_hand(scripted_engine):
    async with Run(Calculator, scripted_engine, breaker=1) as run:
        outcomes = [trajectory.outcome async for trajectory in run]
    assert set(outcomes) == {"engine_error"}

@pytest.fixture
def anyio_backend():
    return "asyncio"
"""
    result = run(pytester, test)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["*no reply is left for this call (0 used so far). Add one with scripted_engine.say(...)*"]
    )


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("templat='x'", "@pytest.mark.scripted_engine: unknown setting 'templat'; the settings are adapters, chunks,*"),
        ("'a reply'", "@pytest.mark.scripted_engine('a reply'): settings have names*scripted_engine.say(...)."),
        ("template='x'", "template 'x' cannot be read*"),
        ("chunks=0", "chunks=0: give a size of at least 1*"),
    ],
)
def test_invalid_settings_are_one_message(pytester: pytest.Pytester, mark: str, message: str) -> None:
    result = run(pytester, f"@pytest.mark.scripted_engine({mark})\ndef test_it(scripted_engine): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([message])
    result.stdout.no_fnmatch_line("*Error*runner*")


def test_settings_of_the_marker_are_those_of_the_engine(pytester: pytest.Pytester) -> None:
    test = """
@pytest.mark.scripted_engine(template="hermes", tokenizer=AwkwardTokenizer(), context=5000)
def test_it(scripted_engine):
    scripted_engine.say(call("multiply", a=6, b=7), "It is 42")
    assert play(Calculator, scripted_engine).reward == 1
    assert "<tool_response>" in scripted_engine.prompts[1]
"""
    run(pytester, test).assert_outcomes(passed=1)
