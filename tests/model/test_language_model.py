"""Models either compute what transformers computes, through our attention, or are refused."""

import copy
from typing import Any

import pytest
import torch
import transformers

from prefixkv.errors import ModelError
from prefixkv.model import LanguageModel

hf: Any = transformers  # partly untyped

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ALL = (None,) * 4

SERVED = [
    (hf.LlamaConfig(**SMALL, head_dim=16), ALL),
    (hf.LlamaConfig(**SMALL, attention_bias=True, tie_word_embeddings=True), ALL),
    (hf.Qwen2Config(**SMALL), ALL),
    (
        hf.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=3, max_window_layers=2),
        (None, None, 3, 3),
    ),
    (hf.Qwen3Config(**SMALL, head_dim=16), ALL),
    (hf.MistralConfig(**SMALL, sliding_window=5), (5,) * 4),
    (hf.MistralConfig(**SMALL, sliding_window=None), ALL),
    (hf.Phi3Config(**SMALL, sliding_window=4), (4,) * 4),
    (
        hf.Gemma3TextConfig(
            **SMALL,
            head_dim=8,
            sliding_window=3,
            layer_types=[*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        ),
        (3, 3, None, 3),
    ),
    (hf.SmolLM3Config(**SMALL), ALL),
    (hf.GraniteConfig(**SMALL, attention_multiplier=0.3, logits_scaling=2.0), ALL),
    (hf.OlmoConfig(**SMALL), ALL),
]


def build(config: Any, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(copy.deepcopy(config)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # larger than at initialisation, so that attention is far from uniform
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def name(value: Any) -> str:
    return type(value).__name__.removesuffix("Config") if hasattr(value, "model_type") else ""


@pytest.mark.parametrize(("config", "windows"), SERVED, ids=name)
def test_a_packed_batch_gives_what_transformers_gives(
    config: Any, windows: tuple[int | None, ...], dense_attention: Any
) -> None:
    reference = build(config)
    reference.set_attn_implementation("sdpa")  # eager computes its softmax in float32
    model = LanguageModel.from_transformers(build(config))
    lengths = [11, 1, 7]
    token_ids = torch.randint(0, 97, (19,), generator=torch.Generator().manual_seed(1))
    attention = dense_attention(model, lengths)
    rows = torch.tensor([18, 10, 3, 11])
    logits = model.forward(token_ids, attention.positions, attention, rows)
    parts = [reference(part[None]).logits[0] for part in torch.split(token_ids, lengths)]

    assert attention.layers == [0, 1, 2, 3]
    assert model.facts.windows == windows
    torch.testing.assert_close(logits, torch.cat(parts)[rows], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "config",
    [
        hf.Gemma2Config(**SMALL, head_dim=8, sliding_window=3, attn_logit_softcapping=None),
        hf.Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    ],
    ids=name,
)
def test_models_that_transformers_computes_in_float32_only(
    config: Any, dense_attention: Any
) -> None:
    reference = build(config, torch.float32)
    model = LanguageModel.from_transformers(build(config, torch.float32))
    token_ids = torch.arange(3, 12)
    attention = dense_attention(model, [9])
    logits = model.forward(token_ids, attention.positions, attention, torch.arange(9))

    torch.testing.assert_close(logits, reference(token_ids[None]).logits[0], rtol=0, atol=1e-4)


def test_the_facts_of_a_model() -> None:
    config = hf.LlamaConfig(**SMALL, head_dim=16, eos_token_id=[3, 5])
    model = LanguageModel.from_transformers(build(config))
    facts = model.facts

    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads) == (4, 4, 2)
    assert (facts.head_dim, facts.vocab_size, facts.max_context) == (16, 97, 64)
    assert facts.dtype == torch.float64
    assert facts.eos_token_ids == {3, 5}
    assert facts.sampling_defaults == {}
    assert len(facts.config_digest) == 32
    assert len(facts.weights_fingerprint) == 16


def test_digests_change_with_what_they_stand_for() -> None:
    config = hf.LlamaConfig(**SMALL)
    first = LanguageModel.from_transformers(build(config)).facts
    again = LanguageModel.from_transformers(build(hf.LlamaConfig(**SMALL))).facts
    theta = hf.LlamaConfig(**SMALL, rope_parameters={"rope_theta": 5.0, "rope_type": "default"})
    other_config = LanguageModel.from_transformers(build(theta)).facts
    changed = build(config)
    changed.model.layers[3].mlp.up_proj.weight.data[1, 2] += 1e-9
    other_weights = LanguageModel.from_transformers(changed).facts

    assert first == again
    assert other_config.config_digest != first.config_digest
    assert other_weights.weights_fingerprint != first.weights_fingerprint


def test_sampling_defaults_and_end_tokens_come_from_the_generation_config() -> None:
    built = build(hf.LlamaConfig(**SMALL, eos_token_id=3))
    built.generation_config = hf.GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, eos_token_id=[7, 8]
    )
    facts = LanguageModel.from_transformers(built).facts

    assert facts.sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert facts.eos_token_ids == {7, 8}


def test_context_ends_where_rotary_embeddings_start_to_look_at_the_batch() -> None:
    factors = [1.0] * 4
    config = hf.Phi3Config(
        **SMALL,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": factors,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 16,
        },
    )

    assert LanguageModel.from_transformers(build(config)).facts.max_context == 16


def test_bfloat16_gives_float32_logits(dense_attention: Any) -> None:
    model = LanguageModel.from_transformers(build(hf.LlamaConfig(**SMALL)).to(torch.bfloat16))
    attention = dense_attention(model, [3])
    logits = model.forward(
        torch.tensor([1, 2, 3]), attention.positions, attention, torch.tensor([2])
    )

    assert logits.dtype == torch.float32
    assert logits.shape == (1, 97)


def without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in SMALL.items() if key not in names}


REFUSED = [
    (hf.Gemma2Config(**SMALL, head_dim=8), "softcap"),
    (hf.GptOssConfig(**SMALL, head_dim=8, num_local_experts=4), "s_aux"),
    (hf.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4), "attention"),
    (hf.FalconMambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2), "attention"),
    (
        hf.JambaConfig(**SMALL, use_mamba_kernels=False, num_experts=1, attn_layer_offset=1),
        "mamba|attention",
    ),
    (hf.FalconH1Config(**SMALL, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_state=4), "state|layers"),
    (hf.Lfm2Config(**SMALL, full_attn_idxs=[1]), "conv"),
    (hf.Gemma3TextConfig(**SMALL, head_dim=8, use_bidirectional_attention=True), "bidirectional"),
    (hf.FalconConfig(**without("intermediate_size"), alibi=True), "attention"),
    (hf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4), "attention"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=name)
def test_what_cannot_be_served_right_is_refused_with_the_reason(config: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        LanguageModel.from_transformers(build(config, torch.float32))


def test_an_encoder_decoder_is_refused() -> None:
    config = hf.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    with pytest.raises(ModelError, match="encoder-decoder"):
        LanguageModel.from_transformers(hf.T5ForConditionalGeneration(config))


def test_chunked_attention_is_refused() -> None:
    config = hf.LlamaConfig(**SMALL)
    config.attention_chunk_size = 8
    with pytest.raises(ModelError, match="attention_chunk_size=8"):
        LanguageModel.from_transformers(build(config))


def test_a_window_that_does_not_reach_the_attention_is_refused() -> None:
    config = hf.LlamaConfig(**SMALL)
    config.sliding_window = 8
    with pytest.raises(ModelError, match="sliding_window=8, but no layer"):
        LanguageModel.from_transformers(build(config))


def test_multi_head_latent_attention_is_refused() -> None:
    config = hf.DeepseekV3Config(
        **without("num_key_value_heads"),
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=4,
    )
    with pytest.raises(ModelError, match="head sizes"):
        LanguageModel.from_transformers(build(config))


def test_state_that_attention_does_not_show_is_found_by_behaviour() -> None:
    """A layer that also looks at its neighbour in the batch, as a convolution would."""
    model = build(hf.LlamaConfig(**SMALL))

    def look_left(_: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output + 0.1 * output.roll(1, dims=1)

    model.model.layers[2].mlp.register_forward_hook(look_left)
    with pytest.raises(ModelError, match="state or attention that a KV cache does not hold"):
        LanguageModel.from_transformers(model)
