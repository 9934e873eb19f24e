"""Variables and labels for a container engine. No container is started here."""

from __future__ import annotations

import os

import pytest

from runner.sandbox import leftovers
from runner.sandbox.client import variable_flags
from runner.sandbox.leftovers import owner_of


@pytest.mark.parametrize("name", ["PATH", "LD_PRELOAD", "DOCKER_HOST", "CONTAINER_HOST", "TMPDIR", "HTTPS_PROXY"])
def test_variables_of_a_container_do_not_change_the_client(name: str) -> None:
    flags, passed = variable_flags({name: "value", "TOKEN": "secret"})
    assert flags == [f"--env={name}=value", "--env=TOKEN"]
    assert passed == {"TOKEN": "secret"}


def test_containers_of_another_machine_are_left_alone() -> None:
    machine, boot, namespace, pid, began = owner_of(os.getpid()).split(":")
    assert not leftovers._is_dead(f"{machine}:{boot}:{namespace}:{pid}:{began}")
    assert leftovers._is_dead(f"{machine}:{boot}:{namespace}:{pid}:1")
    assert leftovers._is_dead(f"{machine}:an-earlier-boot:{namespace}:{pid}:{began}")
    assert not leftovers._is_dead(f"another:an-earlier-boot:{namespace}:{pid}:{began}")
    assert not leftovers._is_dead("no label of ours")
