"""Roles and tags of real names of real model families."""

from __future__ import annotations

import pytest

from mxcli.files.roles import ROLES, SELECTABLE, mtp_prefixes, role_of, role_row, tags_of

FAMILIES = {
    "llama": [
        ("model.embed_tokens.weight", (128256, 4096), "embedding"),
        ("model.layers.0.input_layernorm.weight", (4096,), "norm"),
        ("model.layers.0.self_attn.q_proj.weight", (4096, 4096), "weight"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (64,), "buffer"),
        ("model.layers.31.mlp.gate_proj.weight", (14336, 4096), "weight"),
        ("model.norm.weight", (4096,), "norm"),
        ("lm_head.weight", (128256, 4096), "lm_head"),
    ],
    "llama consolidated": [
        ("tok_embeddings.weight", (32000, 4096), "embedding"),
        ("layers.0.attention.wq.weight", (4096, 4096), "weight"),
        ("layers.0.feed_forward.w1.weight", (11008, 4096), "weight"),
        ("layers.0.attention_norm.weight", (4096,), "norm"),
        ("output.weight", (32000, 4096), "lm_head"),
        ("rope.freqs_cis", (2048, 64), "buffer"),
    ],
    "llama4": [
        ("language_model.model.layers.0.feed_forward.router.weight", (16, 5120), "router"),
        ("language_model.model.layers.0.feed_forward.experts.gate_up_proj", (16, 5120, 16384), "weight"),
        ("language_model.model.layers.0.feed_forward.shared_expert.up_proj.weight", (8192, 5120), "weight"),
        ("language_model.lm_head.weight", (202048, 5120), "lm_head"),
        ("vision_model.positional_embedding_vlm", (577, 1408), "embedding"),
        ("multi_modal_projector.linear_1.weight", (5120, 4096), "weight"),
    ],
    "qwen2": [
        ("model.layers.0.self_attn.q_proj.bias", (896,), "bias"),
        ("model.layers.0.post_attention_layernorm.weight", (896,), "norm"),
    ],
    "qwen3": [("model.layers.0.self_attn.q_norm.weight", (128,), "norm")],
    "qwen3 moe": [
        ("model.layers.0.mlp.gate.weight", (128, 2048), "router"),
        ("model.layers.0.mlp.experts.127.gate_proj.weight", (768, 2048), "weight"),
        ("model.layers.0.mlp.experts.gate_up_proj", (128, 1536, 2048), "weight"),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 2048), "router"),
        ("model.layers.0.linear_attn.conv1d.weight", (8192, 1, 4), "conv"),
        ("model.layers.0.linear_attn.A_log", (32,), "other"),
        ("model.layers.0.linear_attn.dt_bias", (32,), "bias"),
        ("mtp.layers.0.self_attn.q_proj.weight", (4096, 2048), "mtp"),
        ("mtp.norm.weight", (2048,), "norm"),
    ],
    "qwen2 vl": [
        ("visual.patch_embed.proj.weight", (1280, 3, 2, 14, 14), "conv"),
        ("visual.blocks.0.attn.qkv.weight", (3840, 1280), "weight"),
        ("visual.merger.mlp.0.weight", (5120, 5120), "weight"),
        ("visual.merger.ln_q.weight", (1280,), "norm"),
        ("visual.pos_embed.weight", (2304, 1152), "embedding"),
    ],
    "mixtral": [
        ("model.layers.0.block_sparse_moe.gate.weight", (8, 4096), "router"),
        ("model.layers.0.block_sparse_moe.experts.7.w1.weight", (14336, 4096), "weight"),
    ],
    "granite moe": [
        ("model.layers.0.block_sparse_moe.router.layer.weight", (32, 1024), "router"),
        ("model.layers.0.block_sparse_moe.input_linear.weight", (32, 1024, 1024), "weight"),
    ],
    "deepseek v3": [
        ("model.layers.3.mlp.gate.weight", (256, 7168), "router"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", (256,), "bias"),
        ("model.layers.3.mlp.experts.255.down_proj.weight", (7168, 2048), "weight"),
        ("model.layers.3.mlp.shared_experts.down_proj.weight", (7168, 2048), "weight"),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), "weight"),
        ("model.layers.0.self_attn.kv_a_layernorm.weight", (512,), "norm"),
        ("model.layers.61.eh_proj.weight", (7168, 14336), "mtp"),
        ("model.layers.61.enorm.weight", (7168,), "norm"),
        ("model.layers.61.shared_head.head.weight", (129280, 7168), "lm_head"),
        ("model.layers.61.embed_tokens.weight", (129280, 7168), "embedding"),
    ],
    "gpt-oss": [
        ("model.layers.0.mlp.router.weight", (32, 2880), "router"),
        ("model.layers.0.mlp.router.bias", (32,), "bias"),
        ("model.layers.0.mlp.experts.gate_up_proj", (32, 2880, 5760), "weight"),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (32, 5760), "bias"),
        ("model.layers.0.self_attn.sinks", (64,), "other"),
    ],
    "gemma": [
        ("model.layers.0.pre_feedforward_layernorm.weight", (2304,), "norm"),
        ("language_model.model.embed_tokens.weight", (262208, 2560), "embedding"),
        ("vision_tower.vision_model.embeddings.patch_embedding.weight", (1152, 3, 14, 14), "conv"),
        ("vision_tower.vision_model.embeddings.position_embedding.weight", (4096, 1152), "embedding"),
        ("model.language_model.layers.0.router.proj.weight", (128, 2816), "router"),
    ],
    "phi3": [
        ("model.layers.0.self_attn.qkv_proj.weight", (9216, 3072), "weight"),
        ("model.layers.0.mlp.gate_up_proj.weight", (16384, 3072), "weight"),
    ],
    "gpt2": [
        ("wte.weight", (50257, 768), "embedding"),
        ("transformer.wpe.weight", (1024, 768), "embedding"),
        ("h.0.ln_1.weight", (768,), "norm"),
        ("h.0.attn.bias", (1, 1, 1024, 1024), "buffer"),
        ("h.0.attn.masked_bias", (), "buffer"),
        ("h.0.attn.c_attn.weight", (768, 2304), "weight"),
        ("h.0.attn.c_attn.bias", (2304,), "bias"),
        ("ln_f.weight", (768,), "norm"),
    ],
    "gpt neox": [
        ("gpt_neox.embed_in.weight", (50432, 6144), "embedding"),
        ("embed_out.weight", (50432, 6144), "lm_head"),
        ("gpt_neox.layers.0.attention.query_key_value.weight", (18432, 6144), "weight"),
    ],
    "bert": [
        ("embeddings.word_embeddings.weight", (30522, 384), "embedding"),
        ("embeddings.position_embeddings.weight", (512, 384), "embedding"),
        ("bert.embeddings.token_type_embeddings.weight", (2, 384), "embedding"),
        ("embeddings.LayerNorm.weight", (384,), "norm"),
        ("bert.embeddings.LayerNorm.gamma", (384,), "norm"),
        ("bert.embeddings.LayerNorm.beta", (384,), "bias"),
        ("encoder.layer.0.attention.self.query.weight", (384, 384), "weight"),
        ("encoder.layer.0.output.dense.weight", (384, 1536), "weight"),
        ("encoder.layer.0.attention.output.LayerNorm.weight", (384,), "norm"),
        ("pooler.dense.weight", (384, 384), "weight"),
        ("cls.predictions.decoder.weight", (30522, 384), "lm_head"),
        ("cls.predictions.transform.dense.weight", (384, 384), "weight"),
    ],
    "mpnet": [
        ("encoder.layer.0.attention.attn.q.weight", (768, 768), "weight"),
        ("encoder.relative_attention_bias.weight", (32, 12), "embedding"),
    ],
    "t5": [
        ("shared.weight", (32128, 512), "embedding"),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", (512, 512), "weight"),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 8), "embedding"),
        ("encoder.block.0.layer.0.layer_norm.weight", (512,), "norm"),
        ("encoder.block.0.layer.1.DenseReluDense.wi_0.weight", (1024, 512), "weight"),
    ],
    "vit": [
        ("vit.embeddings.cls_token", (1, 1, 768), "other"),
        ("vit.embeddings.position_embeddings", (1, 197, 768), "embedding"),
        ("vit.embeddings.patch_embeddings.projection.weight", (768, 3, 16, 16), "conv"),
        ("vit.encoder.layer.0.layernorm_before.weight", (768,), "norm"),
        ("blocks.0.attn.qkv.weight", (2304, 768), "weight"),
        ("patch_embed.proj.weight", (768, 3, 16, 16), "conv"),
        ("pos_embed", (1, 197, 768), "embedding"),
        ("head.weight", (1000, 768), "lm_head"),
    ],
    "whisper": [
        ("model.encoder.conv1.weight", (384, 80, 3), "conv"),
        ("model.encoder.embed_positions.weight", (1500, 384), "embedding"),
        ("model.decoder.layers.0.encoder_attn.k_proj.weight", (384, 384), "weight"),
        ("model.decoder.layers.0.encoder_attn_layer_norm.weight", (384,), "norm"),
        ("model.decoder.layers.0.fc1.weight", (1536, 384), "weight"),
        ("proj_out.weight", (51865, 384), "lm_head"),
    ],
    "mamba": [
        ("backbone.embeddings.weight", (50280, 768), "embedding"),
        ("backbone.layers.0.mixer.in_proj.weight", (3072, 768), "weight"),
        ("backbone.layers.0.mixer.conv1d.weight", (1536, 1, 4), "conv"),
        ("backbone.layers.0.mixer.conv1d.bias", (1536,), "bias"),
        ("backbone.layers.0.mixer.A_log", (1536, 16), "other"),
        ("backbone.layers.0.mixer.D", (1536,), "other"),
        ("backbone.layers.0.mixer.dt_proj.weight", (1536, 48), "weight"),
        ("backbone.norm_f.weight", (768,), "norm"),
    ],
    "cnn": [
        ("features.0.0.weight", (32, 3, 3, 3), "conv"),
        ("features.1.conv.0.0.weight", (32, 1, 3, 3), "conv"),
        ("features.0.1.weight", (32,), "norm"),
        ("features.0.1.running_mean", (32,), "buffer"),
        ("conv1_BN.weight", (1024,), "norm"),
        ("classifier.1.weight", (1000, 1280), "weight"),
    ],
    "lstm": [
        ("model_state.lstm.weight_ih_l0", (1024, 40), "weight"),
        ("model_state.lstm.weight_hh_l2_reverse", (1024, 256), "weight"),
        ("model_state.lstm.bias_ih_l0", (1024,), "bias"),
        ("decoder.rnn.weight_ih", (512, 128), "weight"),
        ("optimizer_state.state.0.exp_avg", (1024, 40), "other"),
    ],
    "lora": [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", (16, 4096), "lora"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight", (4096, 16), "lora"),
        ("lora_unet_mid_block_attentions_0_proj_in.lora_down.weight", (16, 1280), "lora"),
    ],
    "heads under other names": [
        ("to_logits.weight", (32000, 512), "lm_head"),
        ("model.out_head.weight", (32000, 512), "lm_head"),
        ("decoder.output_projection.weight", (32000, 512), "lm_head"),
        ("transformer.output_layer.weight", (65024, 4096), "lm_head"),
        ("output_layer.weight", (65024, 4096), "lm_head"),
        ("model.transformer.ff_out.weight", (50304, 2048), "lm_head"),
        ("model.transformer.blocks.0.ff_out.weight", (2048, 8192), "weight"),
        ("generator.proj.weight", (32000, 512), "lm_head"),
        ("mlm_head.weight", (32000, 512), "lm_head"),
        ("logits_proj.weight", (32000, 512), "lm_head"),
        ("talker.codec_head.weight", (3072, 896), "lm_head"),
        ("cls.seq_relationship.weight", (2, 768), "lm_head"),
        ("regression_head.weight", (1, 768), "lm_head"),
        ("reward.weight", (1, 768), "lm_head"),
        ("layers.0.mlp.output_layer.weight", (64, 256), "weight"),
        ("text_projection.weight", (512, 512), "weight"),
    ],
    "tables under other names": [
        ("token_emb.weight", (32000, 512), "embedding"),
        ("speaker_emb.weight", (100, 512), "embedding"),
        ("emotion_embs.weight", (8, 512), "embedding"),
        ("emb_code.0.weight", (1024, 512), "embedding"),
        ("embedding_layer.weight", (32000, 512), "embedding"),
        ("embeddings.word.weight", (32000, 512), "embedding"),
        ("model.embed.tok.weight", (32000, 512), "embedding"),
        ("lut.weight", (32000, 512), "embedding"),
        ("rel_pos_bias.weight", (32, 8), "embedding"),
        ("patch_emb.weight", (512, 588), "weight"),
        ("layers.0.member.weight", (64, 64), "weight"),
        ("embed_proj.weight", (64, 64), "weight"),
    ],
    "routers under other names": [
        ("model.layers.2.moe.gate_network.weight", (8, 64), "router"),
        ("model.layers.4.ffn_layer.gate.weight", (8, 64), "router"),
        ("model.layers.5.mlp.switch.weight", (8, 64), "router"),
        ("model.layers.6.moe.w_gate.weight", (8, 64), "router"),
        ("model.layers.6.moe_layer.wg.weight", (8, 64), "router"),
        ("model.layers.8.mlp.gating.weight", (8, 64), "router"),
        ("model.layers.14.experts_gate.weight", (8, 64), "router"),
        ("model.layers.15.mlp.gate_fn.weight", (8, 64), "router"),
        ("model.layers.18.mlp.expert_gate.weight", (8, 64), "router"),
        ("model.layers.0.mlp.w_gate.weight", (256, 64), "weight"),
        ("model.layers.0.moe_mlp.w_gate.weight", (8, 256, 64), "conv"),
        ("model.layers.0.mlp.gate_proj.weight", (256, 64), "weight"),
    ],
    "bare arrays": [
        ("arr_0", (4, 64), "weight"),
        ("activations", (2, 16, 64), "weight"),
        ("vector", (64,), "other"),
    ],
    "others": [
        ("transformer_blocks.0.norm1.linear.weight", (18432, 3072), "weight"),
        ("attn.in_proj_weight", (2304, 768), "weight"),
        ("attn.in_proj_bias", (2304,), "bias"),
        ("params.Dense_0.kernel", (64, 128), "weight"),
        ("logit_scale", (), "other"),
    ],
}
CASES = [
    pytest.param(name, shape, role, id=f"{family}: {name}")
    for family, rows in FAMILIES.items()
    for name, shape, role in rows
]

QUANTIZED = [
    ("fc1.weight", (64, 96), "F8_E4M3", "codes"),
    ("fc1.weight", (64, 48), "U8", "codes"),
    ("fc1.weight", (64, 96), "F4", "codes"),
    ("fc1.weight_packed", (64, 48), "U8", "codes"),
    ("fc1._weight_qdata", (64, 48), "U8", "codes"),
    ("model.layers.0.mlp.experts.gate_up_proj_blocks", (4, 64, 2, 16), "U8", "codes"),
    ("model.layers.0.mlp.experts.gate_up_proj_scales", (4, 64, 2), "U8", "scale"),
    ("fc1.weight_scale", (64, 3), "U8", "scale"),
    ("fc1.weight_scale", (64, 6), "F8_E4M3", "scale"),
    ("fc1._weight_scale", (64, 3), "F8_E8M0", "scale"),
    ("fc1.weight_scale_inv", (1, 1), "F32", "scale"),
    ("model.layers.0.mlp.experts.gate_up_proj_scale_inv", (2, 2, 6), "F32", "scale"),
    ("fc1.weight", (64, 64), "C64", "buffer"),
    ("fc1.weight", (64, 64), "I64", "buffer"),
    ("fc1.weight", (64, 64), "BOOL", "buffer"),
    ("fc1.weight_scale_2", (), "F32", "scale"),
    ("fc1.weight_global_scale", (1,), "F32", "scale"),
    ("fc1.input_scale", (), "F32", "scale"),
    ("layers.0.attn.wq.scale", (8, 8), "F8_E8M0", "scale"),
    ("layers.0.attn.wq.scale", (8, 8), "F32", "scale"),
    ("block.0.attn.norm.scale", (2880,), "F32", "norm"),
    ("model.layers.0.self_attn.k_scale", (), "F32", "scale"),
    ("fc1.g_idx", (64,), "I32", "buffer"),
    ("embeddings.position_ids", (1, 512), "I64", "buffer"),
    ("bn.num_batches_tracked", (), "I64", "buffer"),
    ("lm_head.weight", (128, 64), "F8_E4M3", "lm_head"),
]


@pytest.mark.parametrize(("name", "shape", "role"), CASES)
def test_role_of_real_names(name: str, shape: tuple[int, ...], role: str) -> None:
    assert role_of(name, shape, "BF16") == role


@pytest.mark.parametrize(("name", "shape", "dtype", "role"), QUANTIZED)
def test_role_in_quantized_checkpoints(name: str, shape: tuple[int, ...], dtype: str, role: str) -> None:
    assert role_of(name, shape, dtype) == role


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fc.bias", (2560,)),
        ("fc.weight", (2560,)),
        ("model.norm.weight", (64,)),
        ("conv1d.weight", (64, 1, 4)),
        ("embed_tokens.weight", (100, 64)),
    ],
)
def test_nothing_but_float_matrices_of_linear_layers_is_a_weight(name: str, shape: tuple[int, ...]) -> None:
    """A bias must never be quantized because a preset was forgotten."""
    assert role_of(name, shape, "BF16") != "weight"
    assert role_of(name, shape, "I64") != "weight"


@pytest.mark.parametrize(
    ("name", "role", "tags"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "weight", {"weight", "attn"}),
        ("model.layers.0.mlp.up_proj.weight", "weight", {"weight", "mlp"}),
        ("model.layers.0.mlp.experts.3.up_proj.weight", "weight", {"weight", "mlp", "expert"}),
        ("model.layers.0.mlp.experts.gate_up_proj", "weight", {"weight", "mlp", "expert"}),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", "weight", {"weight", "mlp", "shared_expert"}),
        ("model.layers.0.mlp.gate.weight", "router", {"router", "mlp"}),
        ("model.layers.0.mlp.gate.e_score_correction_bias", "bias", {"bias", "router", "mlp"}),
        ("model.embed_tokens.weight", "embedding", {"embedding", "embed"}),
        ("encoder.layer.0.attention.output.dense.weight", "weight", {"weight", "attn"}),
        ("encoder.layer.0.output.dense.weight", "weight", {"weight", "mlp"}),
        ("visual.blocks.0.attn.qkv.weight", "weight", {"weight", "attn", "vision"}),
        ("mtp.layers.0.self_attn.q_proj.weight", "mtp", {"mtp", "attn"}),
        ("lm_head.weight", "lm_head", {"lm_head"}),
    ],
)
def test_tags(name: str, role: str, tags: set[str]) -> None:
    assert tags_of(name, role) == tags


def test_every_selector_the_documentation_names_exists() -> None:
    documented = {
        "router",
        "norm",
        "embed",
        "lm_head",
        "attn",
        "expert",
        "mtp",
        "mlp",
        "bias",
        "conv",
        "buffer",
    }
    assert documented <= SELECTABLE


def test_a_block_with_an_eh_proj_is_an_mtp_block() -> None:
    names = ["model.layers.60.mlp.up_proj.weight", "model.layers.61.eh_proj.weight", "x.eh_proj.weight"]
    assert mtp_prefixes(names) == {"model.layers.61."}


def test_reason_is_that_of_the_row() -> None:
    assert role_row("model.layers.0.mlp.gate.weight", (8, 64), "BF16").reason == "chooses experts"
    assert all(row.reason for row in ROLES)


def test_hostile_names_are_classified_at_once() -> None:
    assert role_of("norm" * 100_000, (4, 4), "F32") == "weight"
    assert role_of("\n.\x1b[31m.weight", (4, 4), "F32") == "weight"
    assert role_of("", (), "F32") == "other"


@pytest.mark.parametrize(
    ("name", "dims", "role"),
    [
        ("token_embd.weight", 2, "embedding"),
        ("output.weight", 2, "lm_head"),
        ("output_norm.weight", 1, "norm"),
        ("rope_freqs.weight", 1, "buffer"),
        ("blk.0.attn_norm.weight", 1, "norm"),
        ("blk.0.attn_q.weight", 2, "weight"),
        ("blk.0.attn_q.bias", 1, "bias"),
        ("blk.0.ffn_gate.weight", 2, "weight"),
        ("blk.0.ffn_gate_inp.weight", 2, "router"),
        ("blk.0.ffn_gate_exps.weight", 3, "weight"),
        ("blk.0.ffn_up_shexp.weight", 2, "weight"),
        ("blk.0.ssm_conv1d.weight", 2, "conv"),
    ],
)
def test_names_of_gguf(name: str, dims: int, role: str) -> None:
    assert role_of(name, (4,) * dims, "F16") == role
    assert ("expert" in tags_of(name, role)) == ("_exps" in name)
    assert ("shared_expert" in tags_of(name, role)) == ("_shexp" in name)
