"""Architectures of transformers that the sweep builds, one row each: a class, what its tiny configuration changes, and
the inputs of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TEXT, STATE, ENCODER_DECODER, MASKED = "text", "state space", "encoder-decoder", "masked"
EXPERTS, STACKS = "experts stored one by one", "experts stored in stacks"
CLASSES, IMAGES, SPEECH, VISION = "classes", "text and images", "speech", "vision"

FP4, ALL = ("nvfp4",), ("mxfp8", "nvfp4")

IDS: Mapping[str, Any] = {"input_ids": (1, 16)}
BOTH: Mapping[str, Any] = {"input_ids": (1, 16), "decoder_input_ids": (1, 10)}
PIXELS: Mapping[str, Any] = {"pixel_values": (1, 3, 32, 32)}
WAVE: Mapping[str, Any] = {"input_values": (1, 800)}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A class of transformers and the changes of its tiny configuration.

    `inputs` are shapes (tuples: of tokens where the name ends in `ids`, else of floats) or values; the second to
    `images` of the tokens stand for an image. `draws` is False if the class's own weights are kept: those of layers
    without a norm before them, which others would saturate. Formats in `dense` load from compressed-tensors with
    dequantize=True only: transformers initializes these models by weights that packed layers do not have yet.
    `refused` are formats that `--for transformers` refuses, with what it says. `options` are those of quantize that the
    model needs.
    """

    kind: str
    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=lambda: IDS)
    images: int = 0
    draws: bool = True
    dense: Sequence[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()

    def __str__(self) -> str:
        return "-".join([self.name, *map(str, self.changes)][:2])


def _rows(kind: str, names: str, inputs: Mapping[str, Any] = IDS, **more: Any) -> tuple[Architecture, ...]:
    return tuple(Architecture(kind, name, inputs=inputs, **more) for name in names.split())


def _images(name: str, changes: Mapping[str, Any], tokens: int, **more: Any) -> Architecture:
    """Return a row of a model of text and images; what is no field of it is an input."""
    fields = {key: more.pop(key) for key in ("refused", "dense") if key in more}
    return Architecture(IMAGES, name, changes, {**IDS, **(more or PIXELS)}, images=tokens, **fields)


_NOTHING = dict.fromkeys(("mxfp8", "nvfp4"), "nothing to quantize")
_NO_LAYOUT = dict.fromkeys(("mxfp8", "nvfp4"), "is loaded by transformers")
_NO_FP4 = dict.fromkeys(FP4, "is loaded by transformers")
_KEEP = ("--on-indivisible", "keep")
_HYBRID = ["mamba", "hybrid"] * 2
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
        """
        LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM GemmaForCausalLM Gemma2ForCausalLM
        Gemma3ForCausalLM GPTNeoXForCausalLM OPTForCausalLM BloomForCausalLM PhiForCausalLM Phi3ForCausalLM
        StableLmForCausalLM CohereForCausalLM Cohere2ForCausalLM OlmoForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM
        Starcoder2ForCausalLM GraniteForCausalLM GlmForCausalLM Glm4ForCausalLM Exaone4ForCausalLM SmolLM3ForCausalLM
        NemotronForCausalLM HunYuanDenseV1ForCausalLM ArceeForCausalLM ApertusForCausalLM SeedOssForCausalLM
        HeliumForCausalLM DiffLlamaForCausalLM PersimmonForCausalLM BioGptForCausalLM XGLMForCausalLM
        VaultGemmaForCausalLM DogeForCausalLM Ernie4_5ForCausalLM MptForCausalLM BitNetForCausalLM
        """,
    ),
    *_rows(TEXT, "GPTBigCodeForCausalLM NanoChatForCausalLM ModernBertDecoderForCausalLM", dense=FP4),
    *_rows(TEXT, "FalconForCausalLM", dense=FP4, refused=_NO_FP4),
    *_rows(TEXT, "GPT2LMHeadModel OpenAIGPTLMHeadModel", refused=_NO_LAYOUT),
    *_rows(TEXT, "LlamaForCausalLM Qwen3ForCausalLM", changes={"tie_word_embeddings": True}),
    Architecture(TEXT, "GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]]}),
    Architecture(TEXT, "CTRLLMHeadModel", {"dff": 128}, dense=ALL),
    *_rows(TEXT, "GPTJForCausalLM CodeGenForCausalLM", changes={"rotary_dim": 16}),
    Architecture(
        TEXT, "FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 1}, dense=FP4, refused=_NO_FP4
    ),
    Architecture(TEXT, "Gemma4ForCausalLM", {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 32}),
    *_rows(STATE, "Lfm2ForCausalLM FalconH1ForCausalLM"),
    *_rows(STATE, "RwkvForCausalLM", dense=FP4, refused=_NO_FP4),
    *_rows(STATE, "xLSTMForCausalLM", dense=FP4),
    *_rows(STATE, "MambaForCausalLM", changes={"time_step_rank": 32}, dense=FP4, refused=_NO_FP4),
    *_rows(STATE, "FalconMambaForCausalLM", changes={"time_step_rank": 32}, dense=FP4),
    Architecture(STATE, "Mamba2ForCausalLM", {"num_heads": 4, "n_groups": 1, "state_size": 16}, dense=FP4),
    Architecture(STATE, "Qwen3_5ForCausalLM", {"layer_types": ["linear_attention", "full_attention"]}),
    Architecture(STATE, "BambaForCausalLM", {"attn_layer_indices": [1], "mamba_n_heads": 4}),
    Architecture(STATE, "ZambaForCausalLM", {"layer_types": _HYBRID, "num_hidden_layers": 4}),
    Architecture(STATE, "Zamba2ForCausalLM", {"layers_block_type": _HYBRID, "num_hidden_layers": 4}),
    Architecture(STATE, "RecurrentGemmaForCausalLM", {"num_hidden_layers": 3}, dense=FP4),
    *_rows(
        EXPERTS,
        """
        MixtralForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM OlmoeForCausalLM DeepseekV2ForCausalLM
        Glm4MoeForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM Ernie4_5_MoeForCausalLM
        HunYuanMoEV1ForCausalLM FlexOlmoForCausalLM
        """,
    ),
    Architecture(EXPERTS, "DeepseekV3ForCausalLM", {"first_k_dense_replace": 1, "head_dim": 16}),
    Architecture(EXPERTS, "Qwen3NextForCausalLM", {"layer_types": ["linear_attention", "full_attention"]}),
    Architecture(EXPERTS, "Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    Architecture(EXPERTS, "PhimoeForCausalLM", {"num_local_experts": 2}),
    Architecture(
        EXPERTS,
        "LongcatFlashForCausalLM",
        {"head_dim": 16, "expert_ffn_hidden_size": 128, "ffn_hidden_size": 128, "zero_expert_num": 1},
    ),
    Architecture(EXPERTS, "Dots1ForCausalLM", {"n_shared_experts": 1}),
    Architecture(EXPERTS, "NemotronHForCausalLM", _NEMOTRON, refused=_NO_FP4),
    Architecture(EXPERTS, "JambaForCausalLM", {"attn_layer_offset": 1, "attn_layer_period": 2, "mamba_dt_rank": 32}),
    Architecture(TEXT, "DeepseekV4ForCausalLM", refused=_NO_FP4, options=_KEEP),
    Architecture(TEXT, "BailingHybridForCausalLM", refused=_NO_FP4),
    *_rows(STACKS, "GptOssForCausalLM JetMoeForCausalLM"),
    *_rows(
        STACKS,
        "GraniteMoeForCausalLM GraniteMoeSharedForCausalLM GraniteMoeHybridForCausalLM",
        changes={"attention_multiplier": 0.125},
    ),
    Architecture(STACKS, "Llama4ForCausalLM"),
    Architecture(
        STACKS, "DbrxForCausalLM", {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8}, "ffn_config": {"moe_top_k": 4}}
    ),
    *_rows(
        ENCODER_DECODER,
        """
        BartForConditionalGeneration MBartForConditionalGeneration PegasusForConditionalGeneration
        PegasusXForConditionalGeneration MarianMTModel M2M100ForConditionalGeneration
        BlenderbotForConditionalGeneration T5GemmaForConditionalGeneration PLBartForConditionalGeneration
        NllbMoeForConditionalGeneration
        """,
        BOTH,
    ),
    *_rows(
        ENCODER_DECODER,
        """
        T5ForConditionalGeneration MT5ForConditionalGeneration UMT5ForConditionalGeneration
        LongT5ForConditionalGeneration SwitchTransformersForConditionalGeneration
        """,
        BOTH,
        draws=False,
        dense=FP4,
    ),
    Architecture(ENCODER_DECODER, "LEDForConditionalGeneration", {"attention_window": 16}, BOTH),
    Architecture(ENCODER_DECODER, "ProphetNetForConditionalGeneration", {}, BOTH),
    Architecture(ENCODER_DECODER, "FSMTForConditionalGeneration", {"src_vocab_size": 128, "tgt_vocab_size": 128}, BOTH),
    *_rows(ENCODER_DECODER, "BlenderbotSmallForConditionalGeneration MvpForConditionalGeneration", BOTH),
    *_rows(
        MASKED,
        """
        BertForMaskedLM RobertaForMaskedLM DebertaV2ForMaskedLM ElectraForMaskedLM AlbertForMaskedLM
        DistilBertForMaskedLM MPNetForMaskedLM XLMRobertaForMaskedLM RemBertForMaskedLM RoFormerForMaskedLM
        BigBirdForMaskedLM ConvBertForMaskedLM EsmForMaskedLM SqueezeBertForMaskedLM
        ErnieForMaskedLM MegatronBertForMaskedLM NystromformerForMaskedLM
        """,
    ),
    Architecture(MASKED, "NomicBertModel", refused=_NO_FP4),
    Architecture(MASKED, "LongformerForMaskedLM", {"attention_window": 16}),
    Architecture(MASKED, "MobileBertForMaskedLM", {"embedding_size": 32}),
    Architecture(MASKED, "ModernBertForMaskedLM", dense=FP4),
    Architecture(MASKED, "IBertForMaskedLM", refused=_NOTHING),
    *_rows(
        CLASSES,
        """
        BertForSequenceClassification LlamaForSequenceClassification Qwen2ForSequenceClassification
        Gemma2ForSequenceClassification RobertaForSequenceClassification DebertaV2ForSequenceClassification
        DistilBertForSequenceClassification MistralForTokenClassification
        """,
        changes={"num_labels": 32},
    ),
    Architecture(CLASSES, "ModernBertForSequenceClassification", {"num_labels": 32}, dense=FP4),
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
    _images("Idefics3ForConditionalGeneration", {**_IMAGE, "vision_config": _TOWER}, 1, pixel_values=(1, 1, 3, 32, 32)),
    _images("SmolVLMForConditionalGeneration", {**_IMAGE, "vision_config": _TOWER}, 1, pixel_values=(1, 1, 3, 32, 32)),
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
            "vision_config": {
                "image_size": 32,
                "patch_size": 16,
                "vision_output_dim": 128,
                "intermediate_layers_indices": [0],
            },
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
    *_rows(
        IMAGES,
        """
        LlavaNextForConditionalGeneration VipLlavaForConditionalGeneration Idefics2ForConditionalGeneration
        """,
        changes={"vision_config": _TOWER},
    ),
    Architecture(
        IMAGES,
        "Glm4vForConditionalGeneration",
        {"vision_config": {"out_hidden_size": 64}, "text_config": {"rope_parameters": _QWEN_ROPE}},
    ),
    Architecture(IMAGES, "ViltForMaskedLM", _TOWER, {**IDS, **PIXELS}),
    Architecture(IMAGES, "Ovis2ForConditionalGeneration"),
    Architecture(IMAGES, "AyaVisionForConditionalGeneration"),
    Architecture(IMAGES, "GitForCausalLM", {"vision_config": _TOWER}, {**IDS, **PIXELS}),
    Architecture(IMAGES, "BlipForConditionalGeneration", {"vision_config": _TOWER}, {**IDS, **PIXELS}),
    *_rows(SPEECH, "HubertForCTC SEWForCTC", WAVE, changes=_SPEECH),
    *_rows(
        SPEECH,
        "Wav2Vec2ForCTC WavLMForCTC UniSpeechForCTC Data2VecAudioForCTC Wav2Vec2ConformerForCTC",
        WAVE,
        changes=_SPEECH,
        dense=FP4,
    ),
    Architecture(SPEECH, "SpeechT5ForSpeechToText", _SPEECH, {**WAVE, "decoder_input_ids": (1, 10)}, dense=FP4),
    *_rows(SPEECH, "SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText", BOTH),
    Architecture(SPEECH, "ParakeetForCTC", {}, {"input_features": (1, 64, 80)}),
    Architecture(SPEECH, "Wav2Vec2BertForCTC", {}, {"input_features": (1, 20, 160)}, dense=FP4),
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
    Architecture(
        SPEECH, "MoonshineForConditionalGeneration", {}, {"input_values": (1, 4000), "decoder_input_ids": (1, 10)}
    ),
    *_rows(
        SPEECH,
        "Qwen2AudioForConditionalGeneration VoxtralForConditionalGeneration GraniteSpeechForConditionalGeneration",
    ),
    Architecture(SPEECH, "MusicgenForCausalLM", {}, {"input_ids": (4, 10)}),
    Architecture(SPEECH, "MoshiForCausalLM"),
    Architecture(
        SPEECH, "ASTForAudioClassification", {"max_length": 64, "num_mel_bins": 32}, {"input_values": (1, 64, 32)}
    ),
    *_rows(
        VISION,
        """
        ViTForImageClassification DeiTForImageClassification BeitForImageClassification CLIPVisionModelWithProjection
        """,
        PIXELS,
        changes=_TOWER,
    ),
    Architecture(VISION, "ImageGPTForCausalImageModeling", refused=_NO_LAYOUT),
    Architecture(
        VISION,
        "Swinv2ForImageClassification",
        {
            "image_size": 32,
            "patch_size": 4,
            "depths": [2],
            "num_layers": 1,
            "num_heads": [2],
            "window_size": 4,
            "embed_dim": 64,
        },
        PIXELS,
        options=_KEEP,
    ),
    Architecture(
        VISION,
        "SegformerForSemanticSegmentation",
        {"num_attention_heads": [1, 2, 4, 8], "hidden_sizes": [32, 64, 96, 128], "depths": [1] * 4},
        {"pixel_values": (1, 3, 64, 64)},
    ),
    Architecture(
        VISION,
        "ConvNextForImageClassification",
        {"hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 1, 1]},
        {"pixel_values": (1, 3, 64, 64)},
    ),
    Architecture(
        VISION,
        "Siglip2Model",
        {},
        {
            **IDS,
            "pixel_values": (1, 16, 768),
            "pixel_attention_mask": [[1] * 16],
            "spatial_shapes": [[4, 4]],
        },
        dense=FP4,
    ),
    Architecture(VISION, "Dinov2Model", _TOWER, PIXELS, refused=_NO_LAYOUT),
    Architecture(VISION, "SiglipModel", {"vision_config": _TOWER}, {**IDS, **PIXELS}, dense=FP4),
    Architecture(VISION, "CLIPModel", {"vision_config": _TOWER}, {**IDS, **PIXELS}),
    Architecture(
        VISION,
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 4,
            "depths": [2],
            "num_layers": 1,
            "num_heads": [2],
            "window_size": 4,
            "embed_dim": 64,
        },
        PIXELS,
    ),
)
