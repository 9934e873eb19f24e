"""Tests with a client that cannot run name the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.clients.installing import CLIENTS


def test_npm_clients_without_node_name_the_command_for_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    # No installed client has this version.
    missing = {name: replace(client, packages=("none==0",)).missing for name, client in CLIENTS.items()}
    assert {name for name, why in missing.items() if "apt-get install nodejs npm" in why} == {
        name for name, client in CLIENTS.items() if client.npm
    }
    assert all("make test-clients" in why for why in missing.values())
