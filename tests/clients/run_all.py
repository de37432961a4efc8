"""Has every client talk to one server of the default model; prints what each was told.

`python -P -m tests.clients.run_all FOLDER NAME...` takes client NAME's packages from the virtual
environment FOLDER/NAME.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.packaging.server_process import serving

MODEL = "smollm2-135m"
DEADLINE_S = 240.0
ROW = "{:14} {:8} {:>12} {:>13}  {}"
# what these would fetch or report elsewhere before they begin
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "ANONYMIZED_TELEMETRY": "False"}


def converse(python: Path, name: str, url: str) -> tuple[bool, str]:
    """Run one client; return whether it was content, and its last line."""
    command = [str(python), "-P", "-W", "ignore", "-m", f"tests.clients.{name}", url, MODEL]
    environment = {**os.environ, **QUIET, "PYTHONPATH": os.getcwd()}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {DEADLINE_S:.0f} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else f"exit status {done.returncode}"


def main(folder: Path, names: list[str]) -> int:
    """Run the clients one after the other; return 1 if one of them failed."""
    num_failed = 0
    script = Path(sys.executable).with_name("prefixkv")
    print(ROW.format("client", "result", "turn 1", "cached then", "answer or error"))
    with (
        tempfile.TemporaryDirectory() as logs,
        serving(script, Path(logs), MODEL, "--num-blocks", "512") as server,
    ):
        for name in names:
            is_content, said = converse(folder / name / "bin" / "python", name, f"{server.url}/v1")
            num_failed += not is_content
            told = json.loads(said) if is_content else {}
            counts = (told.get("num_tokens", ""), told.get("num_cached", ""))
            result = "ok" if is_content else "FAILED"
            print(ROW.format(name, result, *counts, told.get("plain", said)), flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
