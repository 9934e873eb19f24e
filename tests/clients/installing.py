"""Installs agent programs from PyPI and npm, each in a folder of its own under .venv/clients, once.

usage: python -m tests.clients.installing [NAME ...]
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CLIENTS", "Install", "main"]

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".venv" / "clients"


class Failed(Exception):
    """A client could not be installed."""


@dataclass(frozen=True, slots=True)
class Install:
    """The installation of a client, and its path."""

    name: str
    packages: tuple[str, ...]
    npm: bool
    script: str
    """The install script of an npm package that contains its binary. npm does not run the script by itself."""

    @property
    def folder(self) -> Path:
        return HOME / "npm" / self.name if self.npm else HOME / self.name

    @property
    def missing(self) -> str:
        """The reason why the client cannot be played with, or ""."""
        if self._stamp.is_file() and json.loads(self._stamp.read_text()) == list(self.packages):
            return ""
        if self.npm and (shutil.which("node") is None or shutil.which("npm") is None):
            return "node and npm are not installed: `apt-get install nodejs npm`, then `make test-clients`"
        return f"{self.name} is not installed: `make test-clients` does so"

    def program(self, name: str) -> str:
        """The path of a program that the client contains."""
        return str(self.folder / ("node_modules/.bin" if self.npm else "bin") / name)

    @property
    def _stamp(self) -> Path:
        return self.folder / "installed.json"

    def install(self) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        if self.npm:
            npm = ["npm", "install", "--prefix", str(self.folder), "--ignore-scripts", "--no-audit", "--no-fund"]
            run(*npm, "--loglevel=error", *self.packages)
            if self.script:
                script = self.folder / "node_modules" / self.script
                run("node", str(script), at=script.parent)
        else:
            run(sys.executable, "-m", "venv", str(self.folder))
            run(
                self.program("python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self.packages
            )
        self._stamp.write_text(json.dumps(list(self.packages)))


def run(*command: str, at: Path | None = None) -> None:
    done = subprocess.run(command, cwd=at, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-12:]
        raise Failed("\n".join([f"{command[0]} ended with {done.returncode}:", *last]))


def read() -> dict[str, Install]:
    listed = tomllib.loads((Path(__file__).parent / "installs.toml").read_text())
    return {
        name: Install(name, tuple(of.get("pypi") or of["npm"]), "npm" in of, of.get("script", ""))
        for name, of in listed.items()
    }


CLIENTS = read()


def size(folder: Path) -> float:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file() and not each.is_symlink()) / 2**20


def main(names: list[str]) -> int:
    """Install missing clients. Failures are printed, and the tests of these clients are skipped."""
    failed = 0
    for client in [CLIENTS[name] for name in names] or CLIENTS.values():
        if not client.missing:
            continue
        if "apt-get" in client.missing:
            print(f"clients: {client.name} is left out: {client.missing}", flush=True)
            continue
        print(f"clients: {' '.join(client.packages)}", flush=True)
        began = time.monotonic()
        try:
            client.install()
        except Failed as error:
            print(f"clients: {client.name} could not be installed: {error}", flush=True)
            failed = 1
            continue
        print(f"clients: {client.name} in {time.monotonic() - began:.0f} s, {size(client.folder):.0f} MiB", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
