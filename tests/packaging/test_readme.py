"""What the README says is so: its code runs, its requests are answered as shown, links lead on."""

import doctest
import json
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixkv import prefix_cache
from tests.packaging.server_process import DEADLINE_S, serving

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of the README in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def requests() -> list[tuple[str, Any]]:
    """Path and body of each curl command, in order."""
    found = []
    for block in blocks("sh"):
        if block.startswith("curl "):
            _, url, *_, body = shlex.split(block)
            found.append((url.removeprefix("http://127.0.0.1:8000"), json.loads(body)))
    return found


def content_and_usage(answer: Any) -> tuple[str, Any]:
    """Of an answer, or of the short form in which the README shows a second one."""
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"], answer["usage"]
    return answer["content"], answer["usage"]


@pytest.mark.default_model
def test_the_library_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """It reuses what it says it reuses, and prints an answer."""
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {})

    assert capsys.readouterr().out.strip()


@pytest.mark.default_model
def test_the_requests_are_answered_as_shown(tmp_path: Path) -> None:
    """The first one is sent twice; text, counts and cached tokens are those of the README."""
    first, continued = requests()
    shown = [content_and_usage(json.loads(block)) for block in blocks("json")]
    script = Path(sysconfig.get_path("scripts")) / "prefixkv"
    answers = []
    with serving(script, tmp_path, "--num-blocks", "64") as server:
        for path, body in (first, first, continued):
            answer = httpx.post(f"{server.url}{path}", json=body, timeout=DEADLINE_S)
            answers.append(content_and_usage(answer.raise_for_status().json()))

    assert answers[1:] == shown
    assert answers[0][0] == shown[0][0]
    assert answers[0][1]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_docstring_that_it_points_at_runs() -> None:
    """The example of the bare cache does what it shows."""
    assert "prefixkv/prefix_cache.py" in README
    failed, attempted = doctest.testmod(prefix_cache)
    assert failed == 0
    assert attempted > 0


def test_the_make_targets_that_it_names_exist() -> None:
    """All of them, and those of `.ci/run`."""
    makefile = "".join(
        (ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "clients.mk")
    )
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    commands = "\n".join([*blocks("sh"), *re.findall(r"`([^`\n]+)`", README)])
    named = set(re.findall(r"^make ([a-z-]+)", commands, re.MULTILINE))
    in_ci = set(re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))

    assert {"serve", "test"} <= named
    assert named | in_ci <= targets


def test_the_options_that_it_names_exist() -> None:
    """`prefixkv serve --help` knows them."""
    table = README[README.index("## Options") : README.index("## Develop")]
    named = set(re.findall(r"--[a-z][a-z-]+", table)) - {"--help"}
    script = Path(sysconfig.get_path("scripts")) / "prefixkv"
    shown = subprocess.run([script, "serve", "--help"], capture_output=True, text=True, check=True)

    assert len(named) >= 8
    assert named <= set(re.findall(r"--[a-z-]+", shown.stdout))


@pytest.mark.parametrize("text", [README, CHANGELOG], ids=["README", "CHANGELOG"])
def test_its_links_lead_to_files(text: str) -> None:
    """Links that stay in the repository lead to something."""
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]

    assert [link for link in links if not (ROOT / link).exists()] == []


def test_importing_the_library_does_not_import_torch() -> None:
    """The cache is there at once; what needs torch comes when it is asked for."""
    script = (
        "import sys, prefixkv\n"
        "prefixkv.PrefixCache, prefixkv.Sequence, prefixkv.ModelIdentity\n"
        "prefixkv.SamplingParams, prefixkv.EngineConfig\n"
        "heavy = {'torch', 'numpy', 'transformers', 'numba', 'fastapi'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_every_exported_name_is_there() -> None:
    """`__all__` names them, each resolves, `dir` shows them, and no other name does."""
    import prefixkv

    for name in prefixkv.__all__:
        assert getattr(prefixkv, name).__name__ == name
        assert name in dir(prefixkv)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = prefixkv.Nothing  # type: ignore[attr-defined]
