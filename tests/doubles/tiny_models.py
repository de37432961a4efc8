"""Tiny random models in float64, with a byte tokenizer: exact to compare, and made in no time."""

import copy
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prefixkv.config import EngineConfig
from prefixkv.engine import Engine
from prefixkv.model import LanguageModel

EOS = "<|im_end|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", EOS]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


def byte_tokenizer() -> hf.PreTrainedTokenizerFast:
    """One token a byte, and the three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    build: Any = hf.PreTrainedTokenizerFast  # untyped
    wrapped: hf.PreTrainedTokenizerFast = build(
        tokenizer_object=tokenizer, eos_token=EOS, additional_special_tokens=SPECIAL
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_model(kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """A random model of transformers; "mistral" has a sliding window of 11."""
    sizes = {**SMALL, "vocab_size": len(byte_tokenizer())}
    eos = byte_tokenizer().eos_token_id
    config: Any
    if kind == "mistral":
        config = hf.MistralConfig(**sizes, sliding_window=11, eos_token_id=eos, bos_token_id=0)
    else:
        config = hf.LlamaConfig(**sizes, eos_token_id=eos, bos_token_id=0)
    torch.manual_seed(seed)
    build: Any = hf.AutoModelForCausalLM  # untyped
    model = build.from_config(config, attn_implementation="sdpa")
    model = model.to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # larger than at initialisation, so that attention is far from uniform
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tiny_engine(model: Any = None, **options: Any) -> Engine:
    """An engine over a copy of a tiny model."""
    wrapped = LanguageModel.from_transformers(
        copy.deepcopy(model if model is not None else tiny_model()), byte_tokenizer()
    )
    return Engine(wrapped, EngineConfig(**{"num_blocks": 129, "block_size": 4, **options}))


def reference_output(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """What `transformers.generate` gives, greedily."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids
