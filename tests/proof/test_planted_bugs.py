"""Every rule of the core is there for a reason: without it, a test fails within 30 s."""

import json
import subprocess
import sys
from pathlib import Path

import planting
import pytest


def judge(*options: str) -> dict[str, planting.Verdict]:
    """Run the command as a user does; verdicts by the name of the bug.

    30 s are enough for each where nothing else runs; here something does.
    """
    command = [sys.executable, "-P", str(Path(planting.__file__)), "--json", "--limit", "120"]
    command += options
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    verdicts = [planting.Verdict(**json.loads(line)) for line in lines]
    return {verdict.bug: verdict for verdict in verdicts}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, planting.Verdict]:
    return judge("--quick")


@pytest.mark.parametrize("bug", planting.quick_bugs())
def test_a_planted_bug_is_noticed(bug: str, verdicts: dict[str, planting.Verdict]) -> None:
    """The core's tests fail with this bug planted."""
    assert verdicts[bug].killed, verdicts[bug].output


def test_without_a_bug_the_same_command_passes() -> None:
    """The control: what kills the bugs is not the way they are planted."""
    (verdict,) = judge("--control", "--tests", "plain").values()

    assert verdict.exit_code == pytest.ExitCode.OK, verdict.output
