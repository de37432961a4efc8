"""Runs `engine_machine.py`, the state machine of the real engine, in a process of its own.

What Hypothesis draws depends on the modules that are loaded: alone, it sees the same examples in
every run.
"""

import subprocess
import sys
from pathlib import Path

MACHINE = Path(__file__).with_name("engine_machine.py")


def test_the_machine_of_the_real_engine_passes() -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(MACHINE)]
    run = subprocess.run(command, capture_output=True, text=True)
    print(run.stdout)  # noqa: T201 # shown with -s and on failure
    assert run.returncode == 0
    assert "1 passed" in run.stdout
