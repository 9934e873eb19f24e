"""The page of clients agrees with the data and the tests on versions, formats, commands and changes of each client."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.chat_requests import Tolerated
from runner.endpoint.client_config import CLIENTS, Client
from tests.clients.installing import CLIENTS as INSTALLS
from tests.clients.programs import PROGRAMS

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
ROWS = {
    cells[0].partition(": `")[2].rstrip("`"): cells
    for line in PAGE.splitlines()
    if ": `" in line and len(cells := [cell.strip() for cell in line.strip("|").split(" |")]) == 5
}
PLAYED = [client for client in CLIENTS if client.name != "openhands"]


def test_each_client_has_a_row() -> None:
    assert set(ROWS) == {client.name for client in PLAYED}


@pytest.mark.parametrize("client", PLAYED, ids=lambda client: client.name)
def test_row_has_the_tested_version_the_form_and_the_command(client: Client) -> None:
    _, tested, form, command, _ = ROWS[client.name]
    assert tested == client.tested
    assert f"`{client.form}`" in form
    assert command == (f"`{client.command}`" if client.command else "")


@pytest.mark.parametrize("name", sorted({program.client for program in PROGRAMS.values()}))
def test_row_has_the_tolerated_changes(name: str) -> None:
    documented = set(re.findall(r"`(\w+)`", ROWS[name][4])) & {each.value for each in Tolerated}
    assert documented == set().union(*(each.tolerated for each in PROGRAMS.values() if each.client == name))


def test_installed_versions_are_the_tested_ones() -> None:
    tested = {client.name: client.tested for client in PLAYED if client.name in INSTALLS}
    assert set(INSTALLS) == set(tested)
    for name, version in tested.items():
        first = INSTALLS[name].packages[0]
        assert re.split("==|(?<=.)@", first)[-1] == version
