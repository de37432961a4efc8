"""lm-eval itself against a server of the default model: with its cache, and without one.

Attention is batch-invariant, so that the scores have to be the same to the last bit.

`python -P -m tests.clients.lm_eval.compare VENV` takes lm-eval from a virtual environment.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.clients.lm_eval.rivers import FOLDER
from tests.packaging.server_process import serving

MODEL = "smollm2-135m"


@contextmanager
def task_folder() -> Iterator[Path]:
    """A folder with the task, which names its data by an absolute path."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yaml = (FOLDER / "rivers.yaml").read_text(encoding="utf-8")
        data = str(FOLDER / "rivers.jsonl")
        (folder / "rivers.yaml").write_text(yaml.replace("RIVERS_JSONL", data), encoding="utf-8")
        yield folder


def evaluate(venv: Path, url: str, folder: Path) -> list[list[float]]:
    """Run lm-eval; return the log-likelihoods of the choices of each question."""
    arguments = f"model={MODEL},base_url={url}/v1/completions,tokenizer_backend=remote"
    command = [
        str(venv / "bin" / "python"), "-P", "-m", "lm_eval", "run", "--model", "local-completions",
        "--model_args", arguments, "--tasks", "rivers", "--include_path", str(folder),
        "--output_path", str(folder / "out"), "--log_samples", "--batch_size", "1",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    environment.pop("PYTHONPATH", None)
    subprocess.run(command, env=environment, cwd=folder, check=True)
    (samples,) = (folder / "out").rglob("samples_rivers_*.jsonl")
    lines = samples.read_text(encoding="utf-8").splitlines()
    samples.unlink()
    found = sorted((json.loads(line) for line in lines), key=lambda sample: sample["doc_id"])
    return [[float(response[0][0]) for response in sample["resps"]] for sample in found]


def main(venv: Path) -> int:
    """Evaluate warm and cold; print both and whether they agree."""
    script = Path(sys.executable).with_name("prefixkv")
    found = {}
    with task_folder() as folder:
        for kind, *options in (["cached"], ["uncached", "--no-enable-prefix-caching"]):
            options += ["--num-blocks", "512", "--batch-invariant-attention"]
            with serving(script, folder, MODEL, *options) as server:
                found[kind] = evaluate(venv, server.url, folder)
    pairs = [pair for both in zip(*found.values(), strict=True) for pair in zip(*both, strict=True)]
    worst = max(abs(one - other) for one, other in pairs)
    print(f"{len(pairs)} choices; log-likelihoods differ by {worst:.2g} at most, cached or not")
    print(json.dumps(found["cached"]))
    return int(worst > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
