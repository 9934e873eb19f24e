"""Addresses at which another program than a Ray cluster listens."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from runner import BadOption
from runner.cluster.ray import connection as ray_connection
from runner.cluster.ray.connection import Connection
from tests.cluster.listening import HTTP2, listening

ANSWERS = {
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "closes": b"",
    "short": HTTP2[:3],
    "tls": b"\x15\3\1\0\2\2\x46",
    "redis": b"-ERR unknown command 'PRI'\r\n",
    "postgres": b"E\0\0\0\x8bSFATAL\0",
    "mysql": b"I\0\0\0\n8.0.36\0",
    "smtp": b"220 mail.example ESMTP\r\n",
    "silent": None,
}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ray before its connection. The test fails if it connects, since the real Ray would try for most of a minute."""
    fake = MagicMock()
    fake.is_initialized = lambda: False
    fake.init = lambda **_: pytest.fail("Ray was asked")
    monkeypatch.setattr(ray_connection, "ray_module", lambda: fake)
    monkeypatch.setattr(ray_connection, "admit", lambda address: pytest.fail("Ray was asked"))
    return fake


@pytest.mark.parametrize("what", ANSWERS)
def test_an_address_that_is_not_of_ray_is_refused_at_once(ray: Any, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(ray_connection, "CONNECT_SECONDS", 0.2 if what == "silent" else 10)
    with listening(ANSWERS[what]) as address:
        message = rf"RayEngines\(address='{address}'\): no cluster of Ray at '{address}': the server there is not Ray"
        with pytest.raises(BadOption, match=message):
            Connection().enter(object(), who="RayEngines", address=address)


def test_a_cluster_under_tls_is_left_to_ray(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setattr(ray_connection, "admit", lambda address: "only its own")
    with listening(ANSWERS["tls"]) as address, pytest.raises(BadOption, match="accepts this process: only its own"):
        Connection().enter(object(), who="RayEngines", address=address)
