"""What is built and installed is `prefixkv` and nothing else, and it serves from there.

The repository keeps `kernels/` and `api/` at its root, which are names that other distributions
own: neither a wheel nor a test process may hold them under these names.
"""

import importlib
import json
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest
import torch
from tiny_models import byte_tokenizer, tiny_model

from tests.packaging.server_process import DEADLINE_S, clean_environment, serving

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"kernels": "prefixkv/kernels", "api": "prefixkv/api"}


def copy_of_the_tree(target: Path) -> Path:
    """What a clone would hold; builds write into the tree, so that they get one of their own."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    return Path(shutil.copytree(ROOT, target, symlinks=True, ignore=left_out))


def build(tree: Path, *options: str) -> Path:
    """Return the wheel of `tree`; without options it is made from the sdist."""
    command = [sys.executable, "-P", "-m", "build", "--no-isolation", *options, str(tree)]
    run(command, cwd=tree.parent)
    (wheel,) = (tree / "dist").glob("*.whl")
    return wheel


def run(command: list[str], cwd: Path) -> str:
    """Return what a command prints; fail with all of it if the command does."""
    done = subprocess.run(
        command, cwd=cwd, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def expected_members() -> set[str]:
    """The modules of the three folders, under the names that they are shipped as."""
    shipped = {f"prefixkv/{path.name}" for path in (ROOT / "prefixkv").glob("*.py")}
    for folder, target in FOLDERS.items():
        inside = (path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py"))
        shipped |= {f"{target}/{path.as_posix()}" for path in inside}
    return shipped | {"prefixkv/py.typed"}


def members(wheel: Path) -> set[str]:
    """What a wheel holds besides its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    return {name for name in names if not name.split("/")[0].endswith(".dist-info")}


def misnamed(modules: Iterable[str]) -> set[str]:
    """Those of the loaded modules called kernels or api that come from our folders."""
    ours = tuple(ROOT / folder for folder in FOLDERS)
    found = set()
    for name in modules:
        file = getattr(sys.modules[name], "__file__", None)
        if name.split(".")[0] in FOLDERS and file is not None:
            path = Path(file).resolve()
            found |= {name for folder in ours if path.is_relative_to(folder)}
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(copy_of_the_tree(tmp_path_factory.mktemp("build") / "tree"))


@pytest.fixture(scope="module")
def site_packages(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a new environment that holds the wheel alone, and nothing that it depends on."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = ["--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    run([sys.executable, "-P", "-m", "pip", *install], cwd=folder)
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))


@pytest.fixture(scope="module")
def binaries(site_packages: Path) -> Path:
    """The scripts of the new environment, which now sees the dependencies of this one.

    A path that a .pth file adds comes after site-packages, and .pth files found there are not
    read: the editable prefixkv of this environment stays unknown.
    """
    ours = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site_packages / "dependencies.pth").write_text("\n".join(ours))
    return site_packages.parents[2] / "bin"


def test_the_wheel_made_from_the_sdist_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Every module is in it once, under `prefixkv`; no tests, and nothing at the top level."""
    assert members(wheel) == expected_members()


def test_a_planted_top_level_package_is_noticed(tmp_path: Path) -> None:
    """The check above fails for a wheel that would put `kernels` into site-packages."""
    tree = copy_of_the_tree(tmp_path / "tree")
    project = tree / "pyproject.toml"
    given = project.read_text()
    planted = given.replace("\npackages = [", '\npackages = ["kernels",', 1)
    assert planted != given
    project.write_text(planted)
    extra = members(build(tree, "--wheel")) - expected_members()

    assert extra == {f"kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}


def test_installing_it_adds_one_package(site_packages: Path) -> None:
    """Site-packages gets `prefixkv` and its metadata."""
    names = {path.name.split("-")[0] for path in site_packages.iterdir()}

    assert names == {"prefixkv"}


def test_the_installed_package_is_what_gets_imported(binaries: Path) -> None:
    """All three packages come from the new environment, and none of them brings torch."""
    script = (
        "import json, sys, prefixkv, prefixkv.kernels, prefixkv.api\n"
        "packages = prefixkv, prefixkv.kernels, prefixkv.api\n"
        "print(json.dumps([[p.__file__ for p in packages], 'torch' in sys.modules]))"
    )
    files, has_torch = json.loads(run([str(binaries / "python"), "-c", script], binaries))

    assert all(Path(file).is_relative_to(binaries.parent) for file in files)
    assert not has_torch


def test_the_installed_command_helps(binaries: Path) -> None:
    """`prefixkv --help` names its commands."""
    printed = run([str(binaries / "prefixkv"), "--help"], binaries)

    assert {"serve", "generate", "pull", "info"} <= set(printed.split())


def test_the_installed_command_serves(binaries: Path, tmp_path: Path) -> None:
    """A model is loaded and answers over HTTP; SIGTERM ends the server with 0.

    With the backend that compiles nothing, for time's sake.
    """
    model = tmp_path / "model"
    tiny_model(dtype=torch.float32).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    arguments = [str(model), "--served-model-name", "tiny", "--num-blocks", "64"]
    with serving(
        binaries / "prefixkv", tmp_path, *arguments, "--attention-backend", "reference"
    ) as server:
        health = httpx.get(f"{server.url}/health")
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S)
        server.process.send_signal(signal.SIGTERM)
        status = server.process.wait(DEADLINE_S)

    assert health.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert status == 0
    assert "Traceback" not in server.log.read_text()


def test_no_test_has_loaded_our_folders_under_foreign_names() -> None:
    """A `kernels` from our folder would stand where transformers looks for another one."""
    assert misnamed(list(sys.modules)) == set()


def test_a_folder_loaded_under_a_foreign_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above fails once the root of the repository was on the path."""
    monkeypatch.syspath_prepend(ROOT)
    before = set(sys.modules)
    try:
        importlib.import_module("kernels.plan")

        assert misnamed(list(sys.modules)) == {"kernels", "kernels.plan"}
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
