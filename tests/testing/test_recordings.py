"""Recordings: small, sorted, read back exactly, and every refusal names the fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner import BadInput, Sampling
from runner.testing import AwkwardTokenizer, PlainTokenizer, QueuedEngine, play, play_many, record, replay
from runner.tokens.token_diff import token_diff
from tests.testing.inner import run
from tests.testing.test_playing import Sums

pytest_plugins = ["pytester"]

TEST = """
SAID = [call("multiply", a=6, b=7), "It is 42"]

def test_it(recorded_engine):
    assert play(Calculator, recorded_engine(lambda: QueuedEngine().say(*SAID))).reward == 1
"""


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    engine = record(QueuedEngine(tokenizer=AwkwardTokenizer()).say("1", "2", "stop"))
    assert play(Sums, engine).reward == 1
    engine.save(tmp_path / "recordings" / "sums.json")
    return tmp_path / "recordings" / "sums.json"


def test_replay_returns_the_recorded_turns_for_the_same_prompts(recording: Path) -> None:
    engine = replay(recording)
    trajectory = play(Sums, engine)
    assert [turn.text for turn in trajectory.turns] == ["1", "2", "stop"]
    assert engine.leftovers() == ""
    # The recording keeps the sampled ids: the awkward vocabulary has other ids for the same words.
    assert isinstance(engine.tokenizer, AwkwardTokenizer)
    assert trajectory.turns[2].token_ids.tolist() == [*b"stop", engine.tokenizer.eos_id]


def test_a_file_is_readable_and_holds_no_id_twice(recording: Path) -> None:
    document = json.loads(recording.read_text())
    first, second, third = document["calls"]
    assert [call["after"] for call in document["calls"]] == [None, first["call"], second["call"]]
    assert second["prompt"] == "\n<|im_start|>user\n1.<|im_end|>\n<|im_start|>assistant\n"
    assert third["said"] == "stop<|im_end|>"
    ids = sum(len(call["prompt_ids"].split()) + len(call["said_ids"].split()) for call in document["calls"])
    engine = replay(recording)
    assert ids == len(play(Sums, engine).segments[0].log)


def test_a_file_does_not_depend_on_who_was_played_first(tmp_path: Path) -> None:
    texts = set()
    for name, tasks in (("one", "abc"), ("other", "cba")):
        own = Sums()
        chosen = sorted(own.tasks(), key=lambda task: tasks.index(task.id))
        engine = record(QueuedEngine().always("stop"))
        play_many(own, engine, tasks=chosen)
        engine.save(tmp_path / name)
        texts.add((tmp_path / name).read_text())
    assert len(texts) == 1


def test_log_probabilities_are_kept(tmp_path: Path) -> None:
    engine = record(QueuedEngine().say("stop"))
    before = play(Sums, engine).turns[0].logprobs
    engine.save(tmp_path / "it.json")
    assert play(Sums, replay(tmp_path / "it.json")).turns[0].logprobs.tolist() == pytest.approx(
        before.tolist(), abs=1e-4
    )


def test_a_prompt_that_changed_is_shown_token_by_token(recording: Path) -> None:
    class Other(Sums):
        system_prompt = "Be brief."

    with pytest.raises(AssertionError) as caught:
        play(Other, replay(recording))
    lines = str(caught.value).splitlines()
    assert "b#0/main/0: the prompt differs from b#0/main/0 in" in lines[0]
    assert "--runner-record=rewrite" in lines[0]
    assert "at id 1 " in lines[0]
    assert [line.split()[0] for line in lines[1:6]] == ["recorded", "now", "id", "recorded", "now"]
    assert "276:'user'" in lines[4]
    assert "275:'system'" in lines[5]
    assert lines[6].index("^") == lines[4].index("276")


def test_ids_are_aligned_around_inserted_ones() -> None:
    tokenizer = PlainTokenizer()
    shown = token_diff(tokenizer.encode("abcxyz"), tokenizer.encode("abc12xyz"), tokenizer).splitlines()
    recorded, now, marks = shown[3:]
    assert recorded.index("'x'") == now.index("'x'")
    assert marks.count("^^^^^^") == 2


def test_ids_added_at_the_end_are_shown() -> None:
    tokenizer = PlainTokenizer()
    assert "99:'c'" in token_diff(tokenizer.encode("ab"), tokenizer.encode("abc"), tokenizer)


def test_turn_after_the_last_recorded_one_is_refused(recording: Path) -> None:
    engine = replay(recording)
    play(Sums, engine)
    with pytest.raises(
        AssertionError, match=r"has no further turn; all 3 are used\. If that is intended, run pytest with"
    ):
        play(Sums, engine)


def spoilt(recording: Path, before: str, after: str) -> Path:
    text = recording.read_text()
    assert before in text
    recording.write_text(text.replace(before, after, 1))
    return recording


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"stop<|im_end|>"', '"step<|im_end|>"', "was edited by hand or merged"),
        ('"recording": 1', '"recording": 99', "a recording of version 99 and not of version 1"),
        ('"recording": 1', '"recordin": 1', "is not a recording"),
        ('"calls": [', '"callz": [', "has no 'calls': it was edited by hand"),
        ('"calls": [', '<<<<<<< HEAD "calls": [', "cannot be read as JSON"),
    ],
    ids=["edited", "another version", "something else", "a field gone", "a merge's leftovers"],
)
def test_a_file_that_cannot_be_trusted_is_refused(recording: Path, before: str, after: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        replay(spoilt(recording, before, after))
    assert "--runner-record=rewrite" in str(caught.value)


def test_missing_file_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"the recording .*none\.json does not exist: run pytest with --runner-record=once"
    ):
        replay(tmp_path / "none.json")


def test_another_vocabulary_is_refused(recording: Path) -> None:
    with pytest.raises(BadInput, match="recorded with another vocabulary"):
        replay(recording, tokenizer=PlainTokenizer())


def test_a_vocabulary_that_cannot_be_loaded_can_be_given(tmp_path: Path) -> None:
    own = PlainTokenizer(["<|mine|>"])
    engine = record(QueuedEngine(tokenizer=own).say("stop"))
    play(Sums, engine)
    engine.save(tmp_path / "it.json")
    with pytest.raises(BadInput, match=r"give its tokenizer=\."):
        replay(tmp_path / "it.json")
    assert play(Sums, replay(tmp_path / "it.json", tokenizer=own)).text == "stop"


def test_failed_or_unused_engine_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="the engine had no request"):
        record(QueuedEngine()).save(tmp_path / "it.json")
    assert not list(tmp_path.iterdir())


def test_replay_with_another_task_fails(recording: Path) -> None:
    with pytest.raises(AssertionError, match=r"is in no|differs"):
        play(Sums, replay(recording), task="a")


# --- the fixture


def test_missing_recording_fails_the_test_and_names_the_command(pytester: pytest.Pytester) -> None:
    result = run(pytester, TEST)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["the recording *recordings/it.it.json does not exist: run pytest with --runner-record=once*"]
    )


def test_once_records_what_is_missing_and_none_replays_it(pytester: pytest.Pytester) -> None:
    run(pytester, TEST, "--runner-record=once").assert_outcomes(passed=1)
    silent = TEST.replace("QueuedEngine().say(*SAID)", "QueuedEngine().always('never')")
    run(pytester, silent).assert_outcomes(passed=1)
    run(pytester, silent, "--runner-record=once").assert_outcomes(passed=1)
    # After recording again, the test gets the current replies of the engine.
    run(pytester, silent, "--runner-record=rewrite").assert_outcomes(failed=1)


def test_a_test_that_failed_is_not_recorded(pytester: pytest.Pytester) -> None:
    run(pytester, TEST.replace("42", "43"), "--runner-record=once").assert_outcomes(failed=1)
    assert not list(pytester.path.glob("recordings/*"))


def test_unused_recorded_turns_make_the_recording_stale(pytester: pytest.Pytester) -> None:
    run(pytester, TEST, "--runner-record=once").assert_outcomes(passed=1)
    shorter = TEST.replace("play(Calculator", "play(Calculator, limits=Limits(turns=1), engine").replace(
        "engine, rec", "engine=rec"
    )
    result = run(pytester, shorter.replace(".reward == 1", ".outcome == 'turn_limit'"))
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*1 of 2 recorded turns were not used (6#0/main/1): the recording is stale.*"])


def test_two_recordings_of_one_test_need_names(pytester: pytest.Pytester) -> None:
    test = """
def test_it(recorded_engine):
    say = lambda text: lambda: QueuedEngine().say(text)
    assert play(Calculator, recorded_engine(say("42"))).reward == 1
    assert play(Calculator, recorded_engine(say("43"), name="judge")).reward == 0
    with pytest.raises(pytest.fail.Exception, match="already has the recording it.it.json.*name='judge'"):
        recorded_engine(say("44"))
"""
    run(pytester, test, "--runner-record=once").assert_outcomes(passed=1)
    assert {path.name for path in pytester.path.glob("recordings/*")} == {"it.it.json", "it.it.judge.json"}
    run(pytester, test).assert_outcomes(passed=1)


def test_object_that_is_not_an_engine_cannot_be_recorded(pytester: pytest.Pytester) -> None:
    result = run(pytester, "def test_it(recorded_engine): recorded_engine(5)", "--runner-record=once")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["recorded_engine(5): give an engine to record, or a function that returns one."])


def test_unknown_option_is_refused_with_the_known_ones(pytester: pytest.Pytester) -> None:
    result = run(pytester, TEST, "--runner-record=twice")
    result.stderr.fnmatch_lines(["*--runner-record: invalid choice: 'twice' (choose from *none*once*rewrite*)"])


def test_most_likely_ids_are_recorded_if_requested(tmp_path: Path) -> None:
    path, sampling = tmp_path / "most_likely.json", Sampling(logprobs=3)
    engine = record(QueuedEngine().say("1", "stop"))
    before = play(Sums, engine, sampling=sampling)
    engine.save(path)
    after = play(Sums, replay(path), sampling=sampling)
    for one, other in zip(before.turns, after.turns, strict=True):
        assert (one.top_ids == other.top_ids).all()
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
