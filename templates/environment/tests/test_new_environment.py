"""Tests without a model, a GPU or a network: a scripted engine samples the replies that a test lists."""

import pytest
from hypothesis import given, settings
from runner import Outcome, ToolError
from runner.testing import QueuedEngine, call, play, play_cancelled, play_many
from runner.testing.strategies import awkward_text, tool_calls

from new_environment import WORDS, NewEnvironment

HERON, RAVEN = "word-0", "word-1"
ASK = call("find_letter", letter="r")


def test_a_tool_is_an_ordinary_method():
    environment = NewEnvironment()
    environment.secret = "eagle"
    assert environment.find_letter("E") == [1, 5]
    assert environment.find_letter("x") == []
    with pytest.raises(ToolError, match="one letter"):
        environment.find_letter("ea")


def test_question_and_right_guess_are_rewarded():
    trajectory = play(NewEnvironment, [ASK, "Heron!"], task=HERON)
    assert trajectory.outcome is Outcome.COMPLETED
    assert trajectory.messages[-2]["content"] == "[3]"  # the tool's result
    assert trajectory.rewards == {"found": 1, "at_once": 1}
    assert trajectory.metrics == {"letters": 1}


def test_a_wrong_guess_is_answered_and_the_next_one_counts():
    trajectory = play(NewEnvironment, ["raven", "heron"], task=HERON)
    assert [message["role"] for message in trajectory.messages[-3:]] == ["assistant", "user", "assistant"]
    assert trajectory.messages[-2]["content"] == "No, it is another one."
    assert trajectory.reward == 1  # without the 0.1 of `at_once`


@pytest.mark.parametrize("guesses", [1, 3])
def test_game_ends_at_the_limit_of_guesses(guesses):
    trajectory = play(NewEnvironment(guesses=guesses), lambda asked: "raven", task=HERON)
    assert len(trajectory.turns) == guesses
    assert trajectory.reward == 0


def test_bad_arguments_are_reported_and_the_game_continues():
    trajectory = play(NewEnvironment, [call("find_letter", letter="he"), "heron"], task=HERON)
    assert "Ask about one letter." in trajectory.messages[-2]["content"]
    assert trajectory.reward == pytest.approx(1.1)


def test_a_group_plays_the_same_task():
    def reply(asked):
        return "heron" if asked.episode.endswith("#2") else "raven"

    group = play_many(NewEnvironment, reply, tasks=1, group_size=4)
    assert [trajectory.rewards["found"] for trajectory in group] == [0, 0, 1, 0]
    assert len({trajectory.messages[1]["content"] for trajectory in group}) == 1  # the words in the same order


def test_constant_guess_finds_only_its_own_word():
    played = play_many(NewEnvironment, "heron")
    assert [trajectory.rewards["found"] for trajectory in played] == [word == "heron" for word in WORDS]


def test_each_prompt_extends_the_previous_one(scripted_engine):
    scripted_engine.say(ASK, "raven", "heron")
    play(NewEnvironment, scripted_engine, task=HERON)
    first, second, third = scripted_engine.prompts
    assert "Find the hidden word." in first
    assert second.startswith(first)
    assert third.startswith(second)


def test_ids_are_kept_where_encoding_them_again_would_change_them(awkward_tokenizer):
    # play() checks every trajectory: each prompt extends the previous one exactly, and the mask covers the sampled ids.
    engine = QueuedEngine(tokenizer=awkward_tokenizer).say(ASK, "heron")
    assert play(NewEnvironment, engine, task=HERON).reward == pytest.approx(1.1)


@settings(deadline=None, max_examples=20)
@given(tool_calls(NewEnvironment().bound_tools()), awkward_text())
def test_no_call_or_text_makes_an_episode_fail(asks, replies):
    assert not play(NewEnvironment, lambda asked: replies if asked.turn else asks, task=RAVEN).outcome.failed


def test_nothing_blocks_and_nothing_is_left_open(scripted_engine, loop_watchdog, no_leaks):
    scripted_engine.say(ASK, "heron")
    play(NewEnvironment, scripted_engine, task=HERON)


def test_episode_can_be_cancelled_at_every_wait():
    assert play_cancelled(NewEnvironment, [ASK, "heron"], task=HERON) > 10
