"""How the time of the bookkeeping grows: prints microseconds as JSON; run by `bookkeeping.py`.

    match_us    only computing the digests of 750 blocks; matching them, all cached
    scaling_us  each at 1,000 and at 100,000: an eviction with so many idle leaves, and a fork
                with its release at so many tokens

Times are CPU time of the thread, the least of several, since noise only adds. (The invariants are
not checked here: they are in the replays.)
"""

import json
from array import array
from itertools import count
from time import thread_time

from prefixkv import ModelIdentity, PrefixCache, Sequence
from prefixkv.hashing import chain_digest

BLOCK_SIZE = 16
IDENTITY = ModelIdentity(architecture="benchmark")


def compute(cache: PrefixCache, packed: bytes) -> Sequence:
    """Return a sequence of these tokens that is computed, as far as the books know."""
    seq = Sequence.open(cache, IDENTITY, packed)
    rest = packed[seq.num_tokens * 4 :]
    assert seq.reserve(len(rest) // 4)
    seq.write(rest)
    seq.commit()
    return seq


def compute_digests(packed: bytes, num_blocks: int) -> None:
    """Compute the digests of the chain's first blocks, and nothing else."""
    hashed, span, digest = chain_digest, BLOCK_SIZE * 4, bytes(16)
    for start in range(0, num_blocks * span, span):
        digest = hashed(digest + packed[start : start + span])


def match_us(num_blocks: int) -> list[float]:
    """Microseconds of only computing the digests of so many cached blocks, and of matching them."""
    cache = PrefixCache(num_blocks + 2, BLOCK_SIZE)
    packed = array("i", range(num_blocks * BLOCK_SIZE + 1)).tobytes()
    compute(cache, packed).release()
    root = cache.root(IDENTITY)
    times = []
    for _ in range(200):
        clock = [thread_time()]
        compute_digests(packed, num_blocks)
        clock.append(thread_time())
        cache.match(root, packed)
        times.append((clock[1] - clock[0], thread_time() - clock[1]))
    return [min(column) * 1e6 for column in zip(*times, strict=True)]


def eviction_us(num_leaves: int, depth: int) -> float:
    """Microseconds per eviction in a pool full of `num_leaves` idle chains of `depth` blocks."""
    cache = PrefixCache(num_leaves * depth + 1, BLOCK_SIZE)
    tokens, wanted = count(), 64

    def fill(num_chains: int) -> None:
        for _ in range(num_chains):
            compute(cache, (array("i", [next(tokens)]) * depth * BLOCK_SIZE).tobytes()).release()

    def evict() -> float:
        elapsed = 0.0
        for _ in range(16):
            began = thread_time()
            assert cache.pool.reserve(wanted)
            elapsed += thread_time() - began
            fill(wanted // depth)
        return elapsed / (16 * wanted) * 1e6

    fill(num_leaves)
    return min(evict() for _ in range(7))


def fork_us(num_tokens: int) -> float:
    """Microseconds for a fork of `num_tokens` tokens and its release."""
    cache = PrefixCache(num_tokens // BLOCK_SIZE + 2, BLOCK_SIZE)
    seq = compute(cache, array("i", range(num_tokens)).tobytes())

    def fork_and_release() -> float:
        began = thread_time()
        for _ in range(1000):
            seq.fork().release()
        return (thread_time() - began) * 1e3

    return min(fork_and_release() for _ in range(7))


def main() -> None:
    """Measure everything and print it."""
    sizes = (1_000, 100_000)
    scaling = {
        "eviction, chains of 1 block": [eviction_us(size, 1) for size in sizes],
        "eviction, chains of 4 blocks": [eviction_us(size, 4) for size in sizes],
        "fork and release": [fork_us(size) for size in sizes],
    }
    print(json.dumps({"match_us": match_us(750), "scaling_us": scaling}))


if __name__ == "__main__":
    main()
