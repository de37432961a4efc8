"""Plants bugs, one at a time and in memory, and sees which test notices.

    python -P tests/proof/planting.py                    # all of them
    python -P tests/proof/planting.py --only "skip"      # those with "skip" in their name
    python -P tests/proof/planting.py --only "triton:"   # those in the Triton kernels
    python -P tests/proof/planting.py --tests machines   # against the state machines alone

Each bug gets a process of its own, forked before anything of prefixkv is imported.
"""

import argparse
import contextlib
import gc
import importlib
import io
import json
import linecache
import multiprocessing
import os
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
WORKERS = 2
SLOW_TO_IMPORT = [
    "torch", "numba", "triton", "transformers.models.llama.modeling_llama", "hypothesis.stateful",
    "torch.distributed.tensor",  # for torch.testing.assert_close
]  # fmt: skip
PLAIN = [
    f"core/test_{noun}.py"
    for noun in ("rules", "branches", "beams", "cache", "identity", "invariants", "scheduler")
]
MACHINES = ["core/test_scheduler_machine.py", "core/test_cache_stateful.py"]
TESTS = {"all": PLAIN + MACHINES, "plain": PLAIN, "machines": MACHINES}
ENGINE = [  # where the engine's rules are tried in the smallest case; the quickest first
    "engine/test_engine.py::test_salts_separate_and_the_same_salt_shares",
    "proof/test_fault_accounts.py::test_blocks_that_a_failed_step_filled_are_not_found",
    "engine/test_engine.py::test_a_request_with_values_not_finite_fails_alone",
    "engine/test_branches.py::test_new_weights_and_resets_meet_branches_in_flight",
    "engine/test_branches.py::test_an_interrupt_at_any_moment_loses_no_branch",
    "engine/test_branches.py::test_each_sample_is_what_it_is_alone_and_costs_its_own_tokens_only",
]
OF_A_BUG = {  # for bugs that the tests of the core cannot see
    "engine": ENGINE,
    "scoring": ["engine/test_prompt_logprobs.py"],
    "held": ["engine/test_held_branches.py"],
    "leases": ["core/test_leases.py"],
    "limits": ["core/test_write_limit.py"],
    "misses": ["core/test_miss.py"],
}

TRITON = {  # where each of its modules is tried, interpreted; the quickest first
    "kernels.triton_attention": [
        "triton/test_triton_attention.py::test_offsets_beyond_int32",
        "triton/test_triton_attention.py::test_what_surrounds_the_output_stays",
        "triton/test_triton_attention.py::test_row_counts_around_a_tile[5]",
        "triton/test_triton_attention.py::test_several_tiles_of_tokens_and_rows[4-1]",
        "triton/test_triton_attention.py::test_several_tiles_of_tokens_and_rows[16-2]",
        "triton/test_triton_attention.py::test_soft_capped_scores[None-0.2]",
        "triton/test_triton_merge.py::test_splits_merge_to_the_whole",
        "triton/test_triton_attention.py::test_with_one_tile_grouping_changes_no_bit[dtype0]",
    ],
    "kernels.triton_backend": ["triton/test_triton_backend.py"],
    "kernels.triton_block_copy": [
        "triton/test_triton_slots.py::test_offsets_beyond_int32",
        "triton/test_triton_slots.py::test_copies_run_one_after_the_other",
    ],
    "kernels.triton_kv_write": [
        "triton/test_triton_slots.py::test_a_write_touches_its_slots_only",
        "triton/test_triton_slots.py::test_a_slot_outside_the_pool_writes_nothing",
    ],
    "kernels.triton_merge": [
        "triton/test_triton_merge.py::test_merges_are_log_sum_exp",
        "triton/test_triton_merge.py::test_an_empty_partial_is_the_identity",
        "triton/test_triton_merge.py::test_rows_without_partials_stay",
    ],
    "kernels.triton_plan": ["test_triton_plan.py"],
}


@dataclass(frozen=True)
class Bug:
    """Edits of one module of prefixkv: (text that stands in it once, what takes its place).

    `tests` names those of OF_A_BUG that have to notice it; empty for the tests of the core.
    """

    name: str
    module: str
    edits: tuple[tuple[str, str], ...]
    tests: str = ""

    def plant(self, source: str) -> str:
        """Return the module's text with the bug in it."""
        for old, new in self.edits:
            if source.count(old) != 1:
                raise ValueError(f"{self.name}: {old!r} stands {source.count(old)} times")
            source = source.replace(old, new)
        return source


@dataclass(frozen=True)
class Verdict:
    """What a run of the tests said; `test` is the first that failed."""

    bug: str
    exit_code: int
    test: str
    seconds: float
    output: str

    @property
    def killed(self) -> bool:
        """Whether a test failed (not: nothing could be collected, or it took too long)."""
        return self.exit_code == pytest.ExitCode.TESTS_FAILED and bool(self.test)


class FirstFailure:
    """A plugin of pytest that remembers the first test that failed."""

    test = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for each phase of each test."""
        if report.failed and not self.test:
            self.test = report.nodeid.rpartition("/")[2]


def load_bugs() -> dict[str, Bug]:
    """All bugs, by name."""
    entries = tomllib.loads((HERE / "planted_bugs.toml").read_text())["bug"]
    bugs = [
        Bug(e["name"], e["module"], tuple(map(tuple, e["edits"])), e.get("tests", ""))
        for e in entries
    ]
    return {bug.name: bug for bug in bugs}


def quick_bugs() -> list[str]:
    """Names of the bugs in the core and in the engine's main path, which every test run plants."""
    return [
        bug.name
        for bug in load_bugs().values()
        if bug.tests in ("", "engine") and bug.module not in TRITON
    ]


class Planter(MetaPathFinder):
    """Imports one module of prefixkv from its changed text."""

    def __init__(self, bug: Bug) -> None:
        self.bug = bug
        self.name = f"prefixkv.{bug.module}"

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Claim the one module."""
        if name != self.name:
            return None
        file = str(ROOT.joinpath("prefixkv", *self.bug.module.split(".")).with_suffix(".py"))
        return spec_from_file_location(name, file, loader=PlantedSource(name, file, self.bug))


class PlantedSource(SourceFileLoader):
    """Reads a module's text with a bug in it; knows of no compiled file."""

    def __init__(self, name: str, path: str, bug: Bug) -> None:
        super().__init__(name, path)
        self.bug = bug

    def get_data(self, path: str) -> bytes:
        """Return the changed text."""
        if path != self.path:
            raise OSError(path)
        text = self.bug.plant(super().get_data(path).decode())
        # Triton's interpreter reads a kernel's text again; no time: an entry that stays
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        return text.encode()


def judge(bug: str, tests: Sequence[str], limit_s: int) -> Verdict:
    """Run tests of the core in this process with a bug ("" for none), up to the limit."""
    assert not any(name.split(".")[0] == "prefixkv" for name in sys.modules)
    if bug:
        sys.meta_path.insert(0, Planter(load_bugs()[bug]))
    sys.dont_write_bytecode = True
    os.environ["HYPOTHESIS_PROFILE"] = "planted"
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # pytest ends as if interrupted
    signal.alarm(limit_s)
    first, output, began = FirstFailure(), io.StringIO(), time.monotonic()
    command = ["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
    command.append("--assert=plain")  # rewriting takes longer than these tests
    if bug:
        planted = load_bugs()[bug]
        tests = OF_A_BUG.get(planted.tests, tests)
        if planted.module in TRITON:
            tests = [f"kernels/{test}" for test in TRITON[planted.module]]
    command += [str(ROOT / "tests" / test) for test in tests]
    with contextlib.redirect_stdout(output):
        exit_code = pytest.main([f"--rootdir={ROOT}", *command], plugins=[first])
    seconds = time.monotonic() - began
    return Verdict(bug, int(exit_code), first.test, seconds, output.getvalue()[-2000:])


def judge_all(bugs: Sequence[str], tests: Sequence[str], limit_s: int) -> Iterator[Verdict]:
    """Judge several bugs, two at a time, in order."""
    os.chdir(ROOT)
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of installed ones none is needed
    for name in SLOW_TO_IMPORT:  # once, instead of in every process
        importlib.import_module(name)
    gc.freeze()  # what is imported stays: no collection in a bug's process looks at it
    context = multiprocessing.get_context("fork")
    with context.Pool(WORKERS, maxtasksperchild=1) as pool:
        yield from pool.imap(partial(judge, tests=tests, limit_s=limit_s), bugs, chunksize=1)


def main() -> int:
    """Print who killed what; the exit status says whether all were."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="bugs with this in their name")
    parser.add_argument("--tests", choices=TESTS, default="all")
    parser.add_argument("--quick", action="store_true", help="the core's and the engine's alone")
    parser.add_argument("--limit", type=int, default=30, help="seconds for each")
    parser.add_argument("--control", action="store_true", help="plant nothing")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each bug")
    options = parser.parse_args()
    names = [""] if options.control else [name for name in load_bugs() if options.only in name]
    if options.quick:
        names = [name for name in names if name in quick_bugs()]
    verdicts = []
    for verdict in judge_all(names, TESTS[options.tests], options.limit):
        verdicts.append(verdict)
        print(json.dumps(asdict(verdict)) if options.json else in_words(verdict), flush=True)  # noqa: T201
    alive = [verdict for verdict in verdicts if not verdict.killed]
    if not options.json:
        killed, slowest = len(names) - len(alive), max(v.seconds for v in verdicts)
        print(f"{killed} of {len(names)} planted bugs killed, the slowest in {slowest:.1f} s")  # noqa: T201
    return bool(alive)


def in_words(verdict: Verdict) -> str:
    """One line for a bug that was killed, all that is known of one that was not."""
    by = verdict.test if verdict.killed else f"ALIVE (exit {verdict.exit_code})\n{verdict.output}"
    return f"{verdict.seconds:5.1f} s  {verdict.bug:<58} {by}"


if __name__ == "__main__":
    sys.exit(main())
