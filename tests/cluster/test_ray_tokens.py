"""Tokens that a process sends to one Ray cluster, and to no other."""

from __future__ import annotations

import importlib
import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.cluster.ray.connection import VARIABLES, admit, give_own_token, restore_variables

GIVEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


class Refused(Exception):
    """The error that Ray raises if a token is missing or wrong."""


class Raylet:
    """Stand-in for the used part of Ray's extension: a cluster that requires one token, or none."""

    def __init__(self, asks_for: str | None, has: str | None) -> None:
        self.asks_for, self.has = asks_for, has
        self.Config = SimpleNamespace(initialize=lambda _: None)
        self.AuthenticationTokenLoader = SimpleNamespace(instance=lambda: self)
        self.AuthenticationError = Refused
        self.made = 0

    def has_token(self, *, ignore_auth_mode: bool) -> bool:
        return self.has is not None

    def reset_cache(self) -> None: ...

    def canonicalize_bootstrap_address_or_die(self, address: str, _: None) -> str:
        return "10.0.0.1:6379" if address == "auto" else address

    def GcsClient(self, *, address: str) -> None:  # noqa: N802  # Ray's name
        assert address == "10.0.0.1:6379"
        shows = os.environ.get("RAY_AUTH_MODE") == "token"
        assert not shows or self.has is not None, "Ray would end this process"
        if self.asks_for is not None and not (shows and self.has == self.asks_for):
            raise Refused

    def generate_new_authentication_token(self) -> str:
        self.made += 1
        return f"token {self.made}"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in GIVEN:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def has(monkeypatch: pytest.MonkeyPatch, raylet: Any) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda _: raylet)


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379"])
@pytest.mark.parametrize("token", [None, "right", "wrong"])
@pytest.mark.parametrize("given", [None, "token", "disabled"])
@pytest.mark.parametrize("asks_for", [None, "right"])
def test_a_token_is_shown_where_a_cluster_asks_for_it(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    token: str | None,
    given: str | None,
    asks_for: str | None,
) -> None:
    before = {name: os.environ.get(name) for name in VARIABLES}
    if given is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", given)
    has(monkeypatch, Raylet(asks_for, token))
    refused = admit(address)
    mode = os.environ.get("RAY_AUTH_MODE")
    if asks_for is None:
        assert (refused is None) == (given != "token" or token is not None)
        assert mode == given or (given is None and mode == "disabled" and address == "auto" and token is not None)
    elif token == "right" and given != "disabled":
        assert refused is None
        assert mode == "token"
    else:
        assert refused is not None
        why = "this process has RAY_AUTH_MODE=disabled" if given == "disabled" else None
        missing = "this machine has none" if token is None else "this machine has another one"
        assert refused.startswith(f"the cluster requires a token, and {why or missing}")
        assert "Copy the file ~/.ray/auth_token" in refused
    restore_variables(before)
    assert [os.environ.get(name) for name in VARIABLES] == [None, None]


def test_a_cluster_of_ones_own_leaves_no_token(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, Raylet(None, None))
    with ExitStack() as until_left:
        give_own_token(until_left)
        path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert path.read_text() == "token 1"
        assert path.parent.stat().st_mode & 0o077 == 0, "no other user may read it"
    assert not path.parent.exists()
    assert not (home / ".ray").exists()


@pytest.mark.parametrize("given", [*GIVEN, "the file"])
def test_a_token_that_is_there_already_stays(home: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    has(monkeypatch, raylet := Raylet(None, None))
    if given == "the file":
        (home / ".ray").mkdir()
        (home / ".ray" / "auth_token").write_text("mine")
    else:
        monkeypatch.setenv(given, "disabled" if given.endswith("MODE") else "mine")
    before = {name: os.environ.get(name) for name in GIVEN}
    with ExitStack() as until_left:
        give_own_token(until_left)
        assert {name: os.environ.get(name) for name in GIVEN} == before
    assert raylet.made == 0
