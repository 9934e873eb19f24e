"""Options for serving episodes to agent programs, on the command lines of `run --agent` and `serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner import BadOption
from runner.cli.settings import SERVED, RunSettings
from runner.environment.open_episodes import OpenEpisodes
from runner.environment.program import Program


def test_options_of_serving_reach_the_environment_of_programs() -> None:
    settings = RunSettings(
        agent="sh {prompt}", tasks=Path("t.jsonl"), system_as_user=True, overflow="end", sent_history="client"
    )
    assert settings.with_program().settings == [
        "agent=sh {prompt}",
        "system_as_user=true",
        "overflow=end",
        "sent_history=client",
    ]
    assert {"system_as_user", "overflow", "sent_history"} <= set(SERVED)


def test_options_of_serving_without_a_program_are_refused() -> None:
    with pytest.raises(BadOption, match="--system-as-user needs --agent"):
        RunSettings(environment="calculator", system_as_user=True).with_program()


def test_serving_defaults_keep_the_run_configuration() -> None:
    settings = RunSettings(agent="sh {prompt}", tasks=Path("t.jsonl"))
    assert settings.with_program().settings == ["agent=sh {prompt}"]


def test_wrong_values_are_refused_by_the_name_of_their_option() -> None:
    with pytest.raises(BadOption, match="--overflow: give 'tell' or 'end', not 'grow'"):
        OpenEpisodes(lambda *_: None, overflow="grow")
    with pytest.raises(BadOption, match="sent_history: give 'append' or 'client', not 'server'"):
        Program("sh {prompt}", sent_history="server")
