"""The only tool of the agents in this folder."""

import subprocess


def run(command: str) -> str:
    """Run a command and return its output."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr or "(nothing)"
