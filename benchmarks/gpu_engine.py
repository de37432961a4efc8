"""The engine's greedy tokens against transformers: a part of `benchmarks/gpu.py`."""

import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.gpu_session import Session
from prefixkv import default_model
from prefixkv.config import EngineConfig
from prefixkv.engine import Engine
from prefixkv.model import LanguageModel
from prefixkv.sampling_params import SamplingParams

TIE = 1e-4  # float32: the two likeliest logits are closer than the order of a sum can tell
REALISTIC = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32_000,
    "max_position_embeddings": 4096,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 512,
    "initializer_range": 0.2,
}  # fmt: skip


class Reference(NamedTuple):
    """What transformers generates for one prompt."""

    tokens: list[int]
    gaps: list[float]  # of the two likeliest logits, at each token


def byte_tokenizer() -> hf.PreTrainedTokenizerFast:
    """One token a byte; for models whose text means nothing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    build: Any = hf.PreTrainedTokenizerFast  # untyped
    wrapped: hf.PreTrainedTokenizerFast = build(tokenizer_object=tokenizer, eos_token="<end>")
    return wrapped


def load(session: Session, dtype: torch.dtype) -> tuple[str, Any, Any]:
    """The default model if it is on this machine, else a random Llama; its name and tokenizer."""
    auto: Any = hf.AutoModelForCausalLM  # untyped
    if not session.smoke and (default_model.cache_folder() / default_model.NAME).exists():
        folder = default_model.fetch()
        model = auto.from_pretrained(folder, dtype=dtype, local_files_only=True)
        tokenizer: Any = hf.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return default_model.NAME, model.to(session.device).eval(), tokenizer
    sizes: Any = TINY if session.smoke else REALISTIC
    config = hf.LlamaConfig(**sizes, eos_token_id=0, bos_token_id=0)
    torch.manual_seed(0)
    with session.device:  # a billion weights are drawn where it is fast
        model = auto.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return "a random Llama", model.to(session.device).eval(), byte_tokenizer()


def make_prompts(vocab_size: int, smoke: bool) -> list[list[int]]:
    """Of many lengths; all begin alike, with five blocks and a few tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 7, 20] if smoke else [1, 15, 16, 17, 100, 255, 400, 700]
    draw = [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]
    common = torch.randint(3, vocab_size, (20 if smoke else 83,), generator=generator).tolist()
    return [common + own for own in draw]


def generate(model: Any, prompt: list[int], num_tokens: int) -> Reference:
    """Greedily, past any end token."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    best = torch.cat([row.float().topk(2).values for row in output.logits])
    tokens = output.sequences[0, len(prompt) :].tolist()
    return Reference(tokens, (best[:, 0] - best[:, 1]).tolist())


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def run_all(
    engine: Engine, prompts: list[list[int]], num_tokens: int
) -> tuple[list[list[int]], int]:
    """Each prompt's tokens, and how many prompt tokens were found in the cache."""
    requests = [engine.add(prompt, greedy(num_tokens)) for prompt in prompts]
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for delta in engine.step():
            if delta.error is not None:
                raise RuntimeError(delta.error)
            found[delta.request_id] += delta.token_ids
    return list(found.values()), sum(request.usage.num_cached_tokens for request in requests)


def compare(expected: list[Reference], found: list[list[int]]) -> dict[str, Any]:
    """Where each prompt's tokens first differ, and how near the two likeliest were there."""
    differ = []
    for i, (reference, tokens) in enumerate(zip(expected, found, strict=True)):
        pairs = zip(reference.tokens, tokens, strict=True)
        first = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            differ.append({"prompt": i, "token": first, "gap": reference.gaps[first]})
    return {
        "prompts": len(found), "equal": len(found) - len(differ), "differ": differ,
        "widest_gap": max((one["gap"] for one in differ), default=0.0),
    }  # fmt: skip


def make_engine(session: Session, model: Any, tokenizer: Any) -> Engine:
    """An engine with a pool of 4 GiB at most."""
    options: dict[str, Any] = {"num_blocks": 4096}
    if session.smoke:
        options = {"num_blocks": 200, "max_num_batched_tokens": 64}
    config = EngineConfig(attention_backend="triton", device=session.device.type, **options)
    return Engine(LanguageModel.from_transformers(model, tokenizer), config)


def waits(engine: Engine, prompts: list[list[int]], num_steps: int) -> dict[str, float]:
    """Lines of source that wait for the device in steps that decode, and how often a step."""
    for prompt in prompts:
        engine.add(prompt, greedy(num_steps + 3))
    for _ in range(2):  # prompts first
        engine.step()
    counts: Counter[str] = Counter()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(num_steps):
                engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for warning in seen:
        if "synchroniz" in str(warning.message) and "prototype" not in str(warning.message):
            parts = warning.filename.replace("\\", "/").split("/")
            counts[f"{'/'.join(parts[-2:])}:{warning.lineno}"] += 1
    while engine.has_work:
        engine.step()
    return {line: count / num_steps for line, count in counts.most_common()}


def run_dtype(session: Session, dtype: torch.dtype) -> dict[str, Any]:
    """One model and dtype: transformers first, for wrapping a model replaces its attention."""
    name, model, tokenizer = load(session, dtype)
    num_tokens = 4 if session.smoke else 32
    prompts = make_prompts(model.config.vocab_size, session.smoke)
    expected = [generate(model, prompt, num_tokens) for prompt in prompts]
    engine = make_engine(session, model, tokenizer)
    cold, found_cold = run_all(engine, prompts, num_tokens)
    warm, found_warm = run_all(engine, prompts, num_tokens)
    result = {
        "model": name, "tokens_each": num_tokens, "cold": compare(expected, cold),
        "warm": compare(expected, warm), "cold_is_warm": cold == warm,
        "cached_cold": found_cold, "cached_warm": found_warm,
    }  # fmt: skip
    if session.device.type == "cuda":
        result["waits_a_step"] = waits(engine, prompts, 5)
    return result


def judge(session: Session, dtype: torch.dtype, result: dict[str, Any]) -> None:
    """In float32 tokens are equal, or tie; in half precision the agreement is only told."""
    label = str(dtype).removeprefix("torch.")
    cold, warm = result["cold"], result["warm"]
    widest = max(cold["widest_gap"], warm["widest_gap"])
    told = f"cold {cold['equal']}, warm {warm['equal']} of {cold['prompts']} equal"
    told += f", widest gap where they differ {widest:.2g}"
    asked = f"engine, {label}: transformers' tokens"
    if dtype == torch.float32:
        session.check(f"{asked}, or ties < {TIE}", told, widest < TIE)
    else:
        session.check(f"{asked} (told only)", told, None)
    session.check(
        f"engine, {label}: prompts are found again", f"{result['cached_warm']} tokens",
        result["cached_warm"] > result["cached_cold"],
    )  # fmt: skip


def run(session: Session, until: float) -> None:
    """float32, then half precision, while more than `until` seconds are left."""
    results: dict[str, Any] = {}
    session.report["engine"] = results
    # the interpreter of triton does not compute with bfloat16
    half = torch.float16 if session.smoke else torch.bfloat16
    for dtype in (torch.float32, half):
        label = str(dtype).removeprefix("torch.")
        if session.left() < until:
            session.skip("engine", label, "out of time")
            continue
        try:
            results[label] = run_dtype(session, dtype)
            judge(session, dtype, results[label])
        except Exception as error:  # the other parts do not need it
            results[label] = {"error": f"{type(error).__name__}: {error}"}
            session.check(f"engine, {label}: runs", results[label]["error"][:200], False)
        session.free()
        session.save()
