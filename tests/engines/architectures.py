"""Architectures of transformers that the sweep builds, one row each: a class, what its tiny configuration changes, and
the inputs of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT, ENCODER_DECODER, MASKED, IMAGES, SPEECH, VISION = "text", "encoder-decoder", "masked", "images", "speech", "vision"
STATE, EXPERTS, CLASSES = "state space", "experts", "classes"

IDS: Mapping[str, Any] = {"input_ids": (1, 16)}
BOTH: Mapping[str, Any] = {"input_ids": (1, 16), "decoder_input_ids": (1, 10)}
PIXELS: Mapping[str, Any] = {"pixel_values": (1, 3, 32, 32)}
WAVE: Mapping[str, Any] = {"input_values": (1, 800)}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A class of transformers; `inputs` are shapes (tuples: tokens where the name ends in `ids`, else floats) or
    values (lists), with `images` tokens of the id `image_token` before the others."""

    kind: str
    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=lambda: IDS)
    image_token: int = 127
    images: int = 0


def _rows(kind: str, inputs: Mapping[str, Any], names: str, **changes: Any) -> tuple[Architecture, ...]:
    return tuple(Architecture(kind, name, changes, inputs) for name in names.split())


def _images(name: str, changes: Mapping[str, Any], tokens: int, **inputs: Any) -> Architecture:
    return Architecture(IMAGES, name, changes, {**IDS, **(inputs or PIXELS)}, images=tokens)


_NEMOTRON = {"moe_shared_expert_intermediate_size": 128, "mamba_num_heads": 4, "ssm_state_size": 16, "n_groups": 1}
_TOWER = {"image_size": 32, "patch_size": 16}
_IMAGE = {"image_token_id": 127}
_QWEN_ROPE = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [4, 6, 6]}
_IMAGE_AT_1_TO_4 = [[0, 1, 1, 1, 1] + [0] * 11]
_SPEECH = {"conv_dim": [64, 64], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2}
_SPEECH |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}

ARCHITECTURES: tuple[Architecture, ...] = (
    *_rows(
        TEXT,
        IDS,
        """
        LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM GemmaForCausalLM Gemma2ForCausalLM
        Gemma3ForCausalLM GPT2LMHeadModel GPTNeoXForCausalLM GPTBigCodeForCausalLM OPTForCausalLM BloomForCausalLM
        FalconForCausalLM PhiForCausalLM Phi3ForCausalLM StableLmForCausalLM CohereForCausalLM Cohere2ForCausalLM
        OlmoForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM Starcoder2ForCausalLM GraniteForCausalLM GlmForCausalLM
        Glm4ForCausalLM Exaone4ForCausalLM SmolLM3ForCausalLM NemotronForCausalLM HunYuanDenseV1ForCausalLM
        ArceeForCausalLM ApertusForCausalLM SeedOssForCausalLM HeliumForCausalLM DiffLlamaForCausalLM
        PersimmonForCausalLM BioGptForCausalLM XGLMForCausalLM NanoChatForCausalLM VaultGemmaForCausalLM
        DogeForCausalLM Ernie4_5ForCausalLM OpenAIGPTLMHeadModel ModernBertDecoderForCausalLM MptForCausalLM
        BitNetForCausalLM
        """,
    ),
    Architecture(TEXT, "LlamaForCausalLM", {"tie_word_embeddings": True}),
    Architecture(TEXT, "Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    Architecture(TEXT, "GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]]}),
    Architecture(TEXT, "GPTJForCausalLM", {"rotary_dim": 16}),
    Architecture(TEXT, "CodeGenForCausalLM", {"rotary_dim": 16}),
    Architecture(TEXT, "CTRLLMHeadModel", {"dff": 128}),
    Architecture(TEXT, "FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 1}),
    *_rows(STATE, IDS, "RwkvForCausalLM Lfm2ForCausalLM"),
    Architecture(STATE, "MambaForCausalLM", {"time_step_rank": 32}),
    Architecture(STATE, "FalconMambaForCausalLM", {"time_step_rank": 32}),
    Architecture(STATE, "Mamba2ForCausalLM", {"num_heads": 4, "n_groups": 1, "state_size": 16}),
    Architecture(STATE, "JambaForCausalLM", {"attn_layer_offset": 1, "attn_layer_period": 2, "mamba_dt_rank": 32}),
    Architecture(STATE, "BambaForCausalLM", {"attn_layer_indices": [1], "mamba_n_heads": 4}),
    Architecture(STATE, "ZambaForCausalLM", {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}),
    Architecture(STATE, "Zamba2ForCausalLM", {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}),
    Architecture(STATE, "FalconH1ForCausalLM", {}),
    Architecture(STATE, "NemotronHForCausalLM", _NEMOTRON),
    Architecture(STATE, "RecurrentGemmaForCausalLM", {"num_hidden_layers": 3}),
    Architecture(STATE, "xLSTMForCausalLM", {}),
    *_rows(
        EXPERTS,
        IDS,
        """
        MixtralForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM OlmoeForCausalLM DeepseekV2ForCausalLM
        PhimoeForCausalLM JetMoeForCausalLM GptOssForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM
        Glm4MoeForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM Ernie4_5_MoeForCausalLM HunYuanMoEV1ForCausalLM
        FlexOlmoForCausalLM Llama4ForCausalLM
        """,
    ),
    Architecture(EXPERTS, "DeepseekV3ForCausalLM", {"first_k_dense_replace": 1, "head_dim": 16}),
    Architecture(EXPERTS, "DbrxForCausalLM", {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8}, "ffn_config": {"moe_top_k": 4}}),
    Architecture(EXPERTS, "Qwen3NextForCausalLM", {"layer_types": ["linear_attention", "full_attention"]}),
    Architecture(EXPERTS, "GraniteMoeHybridForCausalLM", {}),
    Architecture(EXPERTS, "Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    Architecture(EXPERTS, "Dots1ForCausalLM", {"n_shared_experts": 1}),
    *_rows(
        ENCODER_DECODER,
        BOTH,
        """
        T5ForConditionalGeneration MT5ForConditionalGeneration UMT5ForConditionalGeneration
        BartForConditionalGeneration MBartForConditionalGeneration PegasusForConditionalGeneration
        PegasusXForConditionalGeneration MarianMTModel M2M100ForConditionalGeneration
        BlenderbotForConditionalGeneration LongT5ForConditionalGeneration SwitchTransformersForConditionalGeneration
        T5GemmaForConditionalGeneration PLBartForConditionalGeneration NllbMoeForConditionalGeneration
        """,
    ),
    Architecture(ENCODER_DECODER, "LEDForConditionalGeneration", {"attention_window": 16}, BOTH),
    Architecture(ENCODER_DECODER, "ProphetNetForConditionalGeneration", {}, BOTH),
    *_rows(
        MASKED,
        IDS,
        """
        BertForMaskedLM RobertaForMaskedLM ModernBertForMaskedLM DebertaV2ForMaskedLM
        ElectraForMaskedLM AlbertForMaskedLM DistilBertForMaskedLM MPNetForMaskedLM XLMRobertaForMaskedLM
        RemBertForMaskedLM RoFormerForMaskedLM BigBirdForMaskedLM ConvBertForMaskedLM EsmForMaskedLM
        MobileBertForMaskedLM SqueezeBertForMaskedLM IBertForMaskedLM ErnieForMaskedLM MegatronBertForMaskedLM
        NystromformerForMaskedLM NomicBertModel
        """,
    ),
    *_rows(
        CLASSES,
        IDS,
        """
        BertForSequenceClassification LlamaForSequenceClassification Qwen2ForSequenceClassification
        Gemma2ForSequenceClassification RobertaForSequenceClassification DebertaV2ForSequenceClassification
        DistilBertForSequenceClassification MistralForTokenClassification BertForQuestionAnswering
        ModernBertForSequenceClassification
        """,
        num_labels=32,
    ),
    _images("LlavaForConditionalGeneration", {"vision_config": _TOWER, "image_token_index": 127}, 4),
    _images(
        "Qwen2VLForConditionalGeneration",
        {**_IMAGE, "vision_config": {"patch_size": 14}, "text_config": {"rope_parameters": _QWEN_ROPE}},
        4,
        pixel_values=(16, 1176),
        mm_token_type_ids=_IMAGE_AT_1_TO_4,
        image_grid_thw=[[1, 4, 4]],
    ),
    _images(
        "Qwen2_5_VLForConditionalGeneration",
        {**_IMAGE, "vision_config": {"out_hidden_size": 64}, "text_config": {"rope_parameters": _QWEN_ROPE}},
        4,
        pixel_values=(16, 1176),
        mm_token_type_ids=_IMAGE_AT_1_TO_4,
        image_grid_thw=[[1, 4, 4]],
    ),
    _images(
        "Qwen3VLForConditionalGeneration",
        {**_IMAGE, "vision_config": {"out_hidden_size": 64, "deepstack_visual_indexes": [0]}},
        4,
        pixel_values=(16, 1536),
        mm_token_type_ids=_IMAGE_AT_1_TO_4,
        image_grid_thw=[[1, 4, 4]],
    ),
    _images("Gemma3ForConditionalGeneration", {**_IMAGE, "vision_config": _TOWER, "mm_tokens_per_image": 4}, 4),
    _images(
        "Idefics3ForConditionalGeneration", {**_IMAGE, "vision_config": _TOWER}, 1, pixel_values=(1, 1, 3, 32, 32)
    ),
    _images(
        "SmolVLMForConditionalGeneration", {**_IMAGE, "vision_config": _TOWER}, 1, pixel_values=(1, 1, 3, 32, 32)
    ),
    _images("PaliGemmaForConditionalGeneration", {**_IMAGE, "vision_config": _TOWER, "projection_dim": 64}, 4),
    _images(
        "InternVLForConditionalGeneration",
        {**_IMAGE, "vision_config": {"image_size": [32, 32], "patch_size": [16, 16]}},
        1,
    ),
    _images(
        "AriaForConditionalGeneration",
        {
            "image_token_index": 127,
            "vision_config": _TOWER,
            "text_config": {"moe_num_experts": 4, "moe_topk": 4},
            "projector_patch_to_query_dict": {4: 4},
        },
        4,
    ),
    _images(
        "MllamaForConditionalGeneration",
        {
            "vision_config": {"image_size": 32, "patch_size": 16, "vision_output_dim": 128, "intermediate_layers_indices": [0]},
            "text_config": {"cross_attention_layers": [1]},
        },
        0,
        pixel_values=(1, 1, 4, 3, 32, 32),
        aspect_ratio_ids=[[1]],
        aspect_ratio_mask=[[[1, 0, 0, 0]]],
        cross_attention_mask=[[[[1, 0, 0, 0]]] * 16],
    ),
    _images(
        "Mistral3ForConditionalGeneration",
        {"vision_config": {"image_size": 64, "patch_size": 16}, "image_token_index": 127},
        2,
        pixel_values=(1, 3, 32, 64),
        image_sizes=[[32, 64]],
    ),
    Architecture(IMAGES, "Ovis2ForConditionalGeneration"),
    Architecture(IMAGES, "AyaVisionForConditionalGeneration"),
    Architecture(IMAGES, "GitForCausalLM", {"vision_config": _TOWER}, {**IDS, **PIXELS}),
    Architecture(IMAGES, "BlipForConditionalGeneration", {"vision_config": _TOWER}, {**IDS, **PIXELS}),
    Architecture(SPEECH, "Wav2Vec2ForCTC", _SPEECH, WAVE),
    Architecture(SPEECH, "HubertForCTC", _SPEECH, WAVE),
    Architecture(SPEECH, "WavLMForCTC", _SPEECH, WAVE),
    Architecture(SPEECH, "Wav2Vec2BertForCTC", {}, {"input_features": (1, 20, 160)}),
    Architecture(
        SPEECH,
        "WhisperForConditionalGeneration",
        {"num_mel_bins": 16},
        {"input_features": (1, 16, 128), "decoder_input_ids": (1, 10)},
    ),
    Architecture(
        SPEECH,
        "Speech2TextForConditionalGeneration",
        {"conv_channels": 64, "input_feat_per_channel": 16},
        {"input_features": (1, 40, 16), "decoder_input_ids": (1, 10)},
    ),
    Architecture(SPEECH, "MoonshineForConditionalGeneration", {}, {"input_values": (1, 4000), "decoder_input_ids": (1, 10)}),
    Architecture(SPEECH, "Qwen2AudioForConditionalGeneration", {}, IDS),
    Architecture(SPEECH, "VoxtralForConditionalGeneration", {}, IDS),
    Architecture(SPEECH, "MusicgenForCausalLM", {}, {"input_ids": (4, 10)}),
    Architecture(SPEECH, "ASTForAudioClassification", {"max_length": 64, "num_mel_bins": 32}, {"input_values": (1, 64, 32)}),
    Architecture(SPEECH, "GraniteSpeechForConditionalGeneration", {}, IDS),
    Architecture(VISION, "ViTForImageClassification", _TOWER, PIXELS),
    Architecture(VISION, "DeiTForImageClassification", _TOWER, PIXELS),
    Architecture(VISION, "BeitForImageClassification", _TOWER, PIXELS),
    Architecture(VISION, "Dinov2Model", _TOWER, PIXELS),
    Architecture(VISION, "SiglipModel", {"vision_config": _TOWER}, {**IDS, **PIXELS}),
    Architecture(VISION, "CLIPModel", {"vision_config": _TOWER}, {**IDS, **PIXELS}),
    Architecture(VISION, "CLIPVisionModelWithProjection", _TOWER, PIXELS),
    Architecture(
        VISION,
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "depths": [2], "num_layers": 1, "num_heads": [2], "window_size": 4, "embed_dim": 64},
        PIXELS,
    ),
)
"""Default names of a class come first; a row with changes tests what they change."""
