"""Roles by what a model is known to be: heads, tables, towers, what recipes keep; and where nothing is known."""

from pathlib import Path

import pytest

from mxcli.files.models.known import known_model
from mxcli.files.roles import role_of
from mxcli.files.tensors import TensorInfo

MATRIX = (64, 64)


def infos(*names: str, shape: tuple[int, ...] = MATRIX) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(name, "BF16", shape, role_of(name, shape, "BF16"), Path("model.safetensors"), 0, 8192)
        for name in names
    }


def roles(config: dict[str, object] | None, *names: str) -> dict[str, str]:
    return {name: info.role for name, info in known_model(config).with_roles(infos(*names)).items()}


@pytest.mark.parametrize(
    ("model_type", "name", "role"),
    [
        ("musicgen", "decoder.model.decoder.embed_tokens.3.weight", "embedding"),
        ("bark", "semantic.input_embeds_layer.weight", "embedding"),
        ("ctrl", "transformer.w.weight", "embedding"),
        ("sam", "mask_decoder.iou_token.weight", "embedding"),
        ("speecht5", "speecht5.encoder.wrapped_encoder.embed_positions.pe_k.weight", "embedding"),
        ("modernbert", "decoder.weight", "lm_head"),
        ("gpt_neox", "embed_out.weight", "lm_head"),
        ("biogpt", "output_projection.weight", "lm_head"),
        ("t5gemma", "lm_head.out_proj.weight", "lm_head"),
        ("roberta", "lm_head.dense.weight", "lm_head"),
        ("llama", "score.weight", "lm_head"),
        ("bert", "classifier.weight", "lm_head"),
        ("roberta", "classifier.out_proj.weight", "lm_head"),
        ("mistral_large4", "language_model.model.layers.7.mlp.gate.weight", "router"),
        ("ibert", "ibert.encoder.layer.0.attention.self.query.weight", "other"),
        ("wavlm", "objective.weight", "other"),
        ("lilt", "lilt.layout_embeddings.box_linear_embeddings.weight", "weight"),
        ("llama", "model.layers.0.self_attn.q_proj.weight", "weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.7.w1.weight", "weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", "router"),
    ],
)
def test_the_module_of_a_parameter_decides_its_role(model_type: str, name: str, role: str) -> None:
    assert roles({"model_type": model_type}, name) == {name: role}


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("tok_emb.weight", "embedding"),
        ("pos_emb.weight", "embedding"),
        ("label_emb.weight", "embedding"),
        ("y_embedder.embedding_table.weight", "embedding"),
        ("quantizer.layers.0.codebook.weight", "embedding"),
        ("vq.codebooks.0", "embedding"),
        ("score.weight", "lm_head"),
        ("v_head.summary.weight", "lm_head"),
        ("a.normal.weight", "weight"),
        ("blocks.0.layer_norm.weight", "norm"),
        ("blocks.0.norm1.weight", "norm"),
        ("blocks.0.pre_normalization.weight", "norm"),
    ],
)
def test_names_decide_where_the_model_is_not_known(name: str, role: str) -> None:
    model = known_model({"model_type": "nobody_knows"})

    assert model.words == (
        "model nobody_knows: not known (its model type is not in the table of models); roles by names alone"
    )
    assert roles({"model_type": "nobody_knows"}, name) == {name: role}


@pytest.mark.parametrize(
    ("name", "shape", "role"),
    [
        ("decoder.weight", (96, 64), "lm_head"),
        ("model.speak.weight", (96, 64), "lm_head"),
        ("model.layers.0.mlp.up_proj.weight", (96, 64), "weight"),
        ("model.speak.weight", (95, 64), "weight"),
        ("speak", (96, 64), "other"),
    ],
)
def test_a_layer_as_large_as_the_table_is_the_head_of_a_model_that_is_not_known(
    name: str, shape: tuple[int, ...], role: str
) -> None:
    table = "model.embed_tokens.weight"
    tensors = infos(table, shape=(96, 64)) | infos(name, shape=shape)

    assert known_model({"model_type": "nobody_knows"}).with_roles(tensors)[name].role == role
    assert known_model({"model_type": "llama"}).with_roles(tensors)[name].role != "lm_head"
    tensors |= infos("lm_head.weight")
    assert known_model({"model_type": "nobody_knows"}).with_roles(tensors)[name].role != "lm_head"


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.sam_model.blocks.0.attn.qkv.weight", "vision"),
        ("model.projector.layers.weight", "vision"),
        ("aligner.layers.0.weight", "vision"),
        ("gen_aligner.layers.0.weight", "vision"),
        ("vpm.encoder.layers.0.mlp.fc1.weight", "vision"),
        ("resampler.kv_proj.weight", "vision"),
        ("patch_merger.merging_layer.weight", "vision"),
        ("model.vision_backbone.image_vit.patch_embedding.weight", "vision"),
        ("apm.layers.0.fc1.weight", "audio"),
        ("audio_projection_layer.linear1.weight", "audio"),
        ("token2wav.code2wav_dit_model.transformer_blocks.0.attn.to_q.weight", "audio"),
        ("model.layers.0.mlp.projector.weight", "weight"),
        ("model.layers.0.self_attn.q_proj.weight", "weight"),
    ],
)
@pytest.mark.parametrize("text", ["lm_head.weight", "model.transformer.wte.embedding", "tok_embeddings.weight"])
def test_towers_under_other_names_are_apart(name: str, role: str, text: str) -> None:
    assert roles({"model_type": "nobody_knows"}, name, text)[name] == role


@pytest.mark.parametrize("name", ["scale_shift_table", "pos", "weight"])
def test_a_matrix_without_a_module_name_is_a_parameter_next_to_modules(name: str) -> None:
    assert roles(None, name) == {name: "weight"}
    assert roles(None, name, "a.weight") == {name: "other", "a.weight": "weight"}


def test_a_source_without_configuration_is_not_known() -> None:
    assert known_model(None).words == "model: not known (no config.json names its model); roles by names alone"


@pytest.mark.parametrize(
    ("config", "name", "role"),
    [
        ({"model_type": "qwen2_5_vl"}, "visual.blocks.0.mlp.gate_proj.weight", "vision"),
        ({"model_type": "qwen2_5_vl"}, "model.visual.merger.mlp.0.weight", "vision"),
        ({"model_type": "gemma3"}, "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", "vision"),
        ({"model_type": "llava"}, "multi_modal_projector.linear_1.weight", "vision"),
        ({"model_type": "idefics3"}, "model.connector.modality_projection.proj.weight", "vision"),
        ({"model_type": "qwen2_audio"}, "audio_tower.layers.0.fc1.weight", "audio"),
        ({"model_type": "voxtral"}, "multi_modal_projector.linear_1.weight", "audio"),
        ({"model_type": "granite_speech"}, "encoder.layers.0.ff1.up_proj.weight", "audio"),
        (
            {"model_type": "qwen2_5_omni", "thinker_config": {"model_type": "qwen2_5_omni_thinker"}},
            "thinker.audio_tower.layers.0.fc1.weight",
            "audio",
        ),
        ({"model_type": "internvl_chat"}, "vision_model.encoder.layers.0.attn.qkv.weight", "vision"),
        ({"model_type": "internvl_chat"}, "mlp1.1.weight", "vision"),
        ({"model_type": "phi4mm"}, "model.embed_tokens_extend.audio_embed.audio_projection.speech.0.weight", "audio"),
    ],
)
def test_towers_next_to_a_language_model_are_apart(config: dict[str, object], name: str, role: str) -> None:
    assert roles(config, name, "language_model.model.layers.0.mlp.up_proj.weight", "lm_head.weight")[name] == role


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("siglip", "vision_model.encoder.layers.0.mlp.fc1.weight"),
        ("clip", "vision_model.encoder.layers.0.self_attn.q_proj.weight"),
        ("vit", "vit.encoder.layer.0.attention.attention.query.weight"),
        ("whisper", "model.encoder.layers.0.fc1.weight"),
        ("wav2vec2", "wav2vec2.encoder.layers.0.feed_forward.output_dense.weight"),
        ("nobody_knows", "vision_model.encoder.layers.0.mlp.fc1.weight"),
    ],
)
def test_a_model_that_only_sees_or_hears_has_no_tower(model_type: str, name: str) -> None:
    assert roles({"model_type": model_type}, name, "text_model.encoder.layers.0.mlp.fc1.weight")[name] == "weight"


@pytest.mark.parametrize(
    ("config", "name", "role"),
    [
        ({"_class_name": "FluxTransformer2DModel"}, "x_embedder.weight", "sensitive"),
        ({"_class_name": "FluxTransformer2DModel"}, "time_text_embed.timestep_embedder.linear_1.weight", "sensitive"),
        ({"_class_name": "FluxTransformer2DModel"}, "transformer_blocks.0.attn.to_q.weight", "weight"),
        ({"_class_name": "FluxTransformer2DModel"}, "single_transformer_blocks.0.proj_out.weight", "weight"),
        ({"_class_name": "WanTransformer3DModel"}, "condition_embedder.time_proj.weight", "sensitive"),
        ({"_class_name": "LTXVideoTransformer3DModel"}, "scale_shift_table", "other"),
        ({"model_type": "t2v"}, "head.head.weight", "sensitive"),
        ({"model_type": "t2v"}, "blocks.0.ffn.0.weight", "weight"),
    ],
)
def test_recipes_of_diffusion_models_keep_their_ends(config: dict[str, object], name: str, role: str) -> None:
    assert roles(config, name) == {name: role}


@pytest.mark.parametrize(
    ("model_type", "name", "role"),
    [
        ("moshi", "depth_decoder.model.layers.0.mlp.fc1.weight", "weight"),
        ("jetmoe", "model.layers.0.mlp.input_linear.weight", "weight"),
        ("granitemoe", "model.layers.0.block_sparse_moe.output_linear.weight", "weight"),
        ("aria", "language_model.model.layers.0.mlp.experts.fc1.weight", "weight"),
        ("conformer", "encoder.layers.0.conv_module.pointwise_conv1.weight", "conv"),
        ("llama", "model.layers.0.conv_module.pointwise_conv1.weight", "conv"),
    ],
)
def test_stacks_are_no_convolutions(model_type: str, name: str, role: str) -> None:
    found = known_model({"model_type": model_type}).with_roles(infos(name, shape=(4, 64, 64)))

    assert found[name].role == role


@pytest.mark.parametrize("model_type", ["zamba", "zamba2"])
def test_layers_that_several_layers_share_are_kept(model_type: str) -> None:
    name = f"model.layers.1.shared_transf{'ormer' if model_type == 'zamba2' else ''}.feed_forward.down_proj.weight"

    assert roles({"model_type": model_type}, name) == {name: "sensitive"}


def test_reasons_name_their_source() -> None:
    def reason(config: dict[str, object], name: str) -> str:
        names = infos(name, "lm_head.weight")
        return known_model(config).with_roles(names)[name].reason

    assert reason({"model_type": "ctrl"}, "transformer.w.weight") == "embedding table in transformers 5.24.0"
    assert reason({"model_type": "llava"}, "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight") == (
        "in vision_tower, next to the language model (transformers 5.24.0)"
    )
    assert reason({"model_type": "nobody_knows"}, "vision_tower.fc1.weight") == (
        "in vision_tower, next to the language model by its name"
    )
    assert reason({"_class_name": "FluxTransformer2DModel"}, "x_embedder.weight") == (
        "projection of the input, kept plain by NVIDIA ModelOpt, examples of diffusers"
    )
    assert reason({"model_type": "llama"}, "model.layers.0.mlp.up_proj.weight") == ""


def test_parts_of_a_model_have_the_rows_of_their_types_but_not_their_heads() -> None:
    config = {"model_type": "llava", "text_config": {"model_type": "modernbert"}}

    assert roles(config, "decoder.weight", "language_model.decoder.weight") == {
        "decoder.weight": "weight",
        "language_model.decoder.weight": "weight",
    }


@pytest.mark.parametrize("kind", ["x" * 300, "x" * 70_000, "é" * 60, "..", "a/b", "a\0b", ""])
def test_a_type_that_can_be_no_folder_is_not_known(kind: str) -> None:
    assert known_model({"model_type": kind, "hidden_size": 64}).source == ""


def test_a_type_that_the_table_lacks_is_built_by_the_installed_transformers() -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "dots1",
        "architectures": ["Dots1ForCausalLM"],
        "vocab_size": 128,
        "moe_intermediate_size": 32,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    model = known_model(config)

    assert model.words == "model dots1: roles from transformers 5.24.0"
    assert model.roles["^lm_head.weight"] == "lm_head"
    assert model.roles["^model.embed_tokens.weight"] == "embedding"
    assert model.roles["^model.layers.0.mlp.experts.0.down_proj.weight"] == "weight"
    assert model.roles["^model.layers.0.mlp.gate.weight"] == "router"


# Parameters, as base models name them, whose role is not that of the class of their module, and the role.
OVERRULED = {
    # Two classes of a type differ: what is a head in one of them stays plain.
    ("csm", "depth_decoder.codebooks_head.weight"): "lm_head",
    ("rf_detr", "class_embed.weight"): "lm_head",
    ("rf_detr", "bbox_embed.layers.0.weight"): "lm_head",
    # Stacks of matrices: of experts, and of gates that are no linear layers.
    ("jetmoe", "layers.0.mlp.input_linear.weight"): "weight",
    ("jetmoe", "layers.0.mlp.output_linear.weight"): "weight",
    ("recurrent_gemma", "layers.0.temporal_block.rg_lru.input_gate_weight"): "other",
    ("recurrent_gemma", "layers.0.temporal_block.rg_lru.recurrent_gate_weight"): "other",
    # Shared by several layers.
    **{
        ("zamba", f"layers.0.shared_transf.{name}_proj.weight"): "sensitive"
        for name in (
            *(f"self_attn.{each}" for each in "qkvo"),
            *("feed_forward.gate", "feed_forward.up", "feed_forward.down"),
        )
    },
}


@pytest.mark.slow
def test_the_table_is_what_the_installed_transformers_builds() -> None:
    from built_models import everything, exceptions, template

    for model_type, models in everything().items():
        rows = known_model({"model_type": model_type}).roles
        assert exceptions(models) == dict(rows), model_type
        for built in models:
            for name, (role, shape) in built.roles.items():
                info = TensorInfo(name, "BF16", shape, role_of(name, shape, "BF16"), Path("x"), 0, 0)
                found = known_model({"model_type": model_type})._role(template(name), info, has_modules=True)[0]
                wanted = OVERRULED.get((model_type, template(name).removeprefix("model.")), role)
                assert len(shape) < 2 or found == wanted, (model_type, built.model, template(name), found, role)
