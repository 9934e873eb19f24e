"""Fixtures of the tests of endpoints."""

from __future__ import annotations

from pathlib import Path

import certifi
import pytest


@pytest.fixture(scope="session")
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a single certificate."""
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text(encoding="utf-8").partition(end)
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    file.write_text(first + end, encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def _few_certificates(one_certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let httpx clients read one certificate: all take 20 ms per client, and no client here connects by TLS."""
    monkeypatch.setenv("SSL_CERT_FILE", str(one_certificate))
