"""The one tool of the agents beside this file."""

import subprocess


def run(command: str) -> str:
    """Output of a command."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr or "(nothing)"
