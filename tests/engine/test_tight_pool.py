"""A pool that holds exactly one request."""

from tiny_models import reference_output, tiny_engine, tiny_model

from prefixkv.engine import Engine
from prefixkv.request import Request
from prefixkv.sampling_params import SamplingParams


def add(engine: Engine, prompt: list[int], max_tokens: int, priority: int = 0) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return engine.add(prompt, params, priority=priority)


def test_a_request_as_large_as_the_pool_finds_room_for_its_last_token() -> None:
    """Twins, preemption and tails before it: nobody else runs, and it ends."""
    model = tiny_model()
    engine = tiny_engine(
        model, num_blocks=5, block_size=2, max_num_seqs=2, max_num_batched_tokens=2
    )
    first = [3, 4, 3, 3, 3, 3]
    for prompt, max_tokens, priority in [
        (first, 5, 0), (first, 5, 0), ([3, 3, 3, 3], 4, 1), ([3], 1, 0), ([3], 1, 0),
    ]:  # fmt: skip
        add(engine, prompt, max_tokens, priority)
    told: dict[str, list[int]] = {}

    def step() -> None:
        for delta in engine.step():
            told.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.check_invariants()

    for _ in range(16):
        step()
    add(engine, [3, 3, 3, 3], 1)
    step()
    step()
    add(engine, [3], 1)
    step()
    large = (first + reference_output(model, first, 5))[:10]
    last = add(engine, large, 1)
    while engine.has_work:
        step()
    assert told[last.request_id] == reference_output(model, large, 1)
