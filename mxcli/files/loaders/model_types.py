"""Model types that transformers 5.24 has trouble with when their layers are quantized."""

from __future__ import annotations

INITIALIZED = tuple(
    """
    bark data2vec-audio falcon falcon_mamba gpt_bigcode longt5 mamba mamba2 modernbert modernbert-decoder mt5 nanochat
    recurrent_gemma rwkv semantic siglip siglip2 speecht5 switch_transformers t5 t5gemma2 umt5 unispeech unispeech-sat
    wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm xlstm
    """.split()  # noqa: SIM905 - a page of words, not a column
)
"""Those whose layers it initializes after they were made, before codes are unpacked."""
MULTIPLIED = ("falcon", "rwkv", "mamba")
"""Those whose forward takes weights out of their layers."""
STACKS = ("llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text", "aria", "aria_text")
"""Those whose experts are stacks in files too, [expert, in, out], so that it joins no single experts."""
EXPERTS_APART = ("llama4", "llama4_text")
"""Those whose experts it takes one by one from compressed-tensors, and keeps so."""
RENAMED_ON_LOAD = tuple(
    """
    altclip aria audio-spectrogram-transformer audioflamingo3 axk2 bailing_hybrid beit chmv2 cohere_asr
    colpali cosmos3_edge cosmos3_omni csm d_fine deepseek_v4 deit depth_anything depth_pro dinov2
    dinov2_with_registers dinov3_convnext dinov3_vit dory dots3_note ernie4_5_vl_moe exaone fuyu gemma3
    glm5_next glm5_next_text glmasr got_ocr2 gradium_phonon_tts granite_speech granite_speech_plus
    grounding-dino gte hrm_text hy_v3 hy_v4 hy_v4_vl hy_v4_vl_text hyperclovax_vision_v2 ijepa inkling2
    inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model internvl jev jina_embeddings_v3 kimi_k25
    kimi_linear kyutai_speech_to_text laguna lara_mini lfm3 lfm3_vl lfm3_vl_vision llava llava_next
    llava_next_video llava_onevision lw_detr mask2former maskformer mimi minimax_m3_vl mistral3 mistral_large4
    mistral_large4_text mllama mm-grounding-dino molmo2 molmo2_text musicflamingo nemo_speechlm nemotron_h
    nemotron_h_omni oneformer paddleocr_vl paligemma pi0 pixio pp_chart2table pp_doclayout_v2 pp_doclayout_v3
    pp_doclayout_v4 prompt_depth_anything qianfan_ocr qwen2_5_omni qwen2_5_omni_thinker qwen2_5_vl qwen2_audio
    qwen2_vl qwen3_omni_moe_thinker radio rf_detr rt_detr rt_detr_v2 sam3_tracker sam3_tracker_video
    sam3_video sapiens2 sarvam_moe segformer step3p7 swin timesfm2_5 tipsv2 tipsv2_dpt tipsv2_text_model
    tipsv2_vision_model ultrabert ultravbert unlimited_ocr vibevoice_asr video_llava vipllava
    vision-encoder-decoder vision-text-dual-encoder vit vit_mae vit_msn vivit voxtral voxtral_realtime
    zoedepth
    """.split()  # noqa: SIM905 - a page of words, not a column
)
"""Those whose linear layers have other names in files, if only another beginning."""
UNSPELLED = tuple(
    """
    altclip cohere_asr d_fine depth_anything depth_pro dinov2_with_registers prompt_depth_anything
    deepseek_v4 dots3_note ernie4_5_vl_moe gradium_phonon_tts gte hrm_text inkling2
    inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model jina_embeddings_v3 kimi_k25 lara_mini lfm3
    lfm3_vl lfm3_vl_vision lw_detr maskformer mistral_large4 mistral_large4_text molmo2 molmo2_text
    nemo_speechlm nemotron_h_omni pi0 pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 qianfan_ocr radio
    rf_detr rt_detr rt_detr_v2 sam3_tracker_video sapiens2 sarvam_moe step3p7 timesfm2_5 tipsv2 tipsv2_dpt
    tipsv2_text_model tipsv2_vision_model ultrabert ultravbert unlimited_ocr
    """.split()  # noqa: SIM905 - a page of words, not a column
)
"""Those of which some linear layers have names in transformers that files/layouts/renamed.py does not list, or are
joined in files."""

RUN_IN_MLX = (
    "llama", "qwen2", "qwen3", "gemma2", "mistral", "phi", "phi3", "olmo2", "granite", "helium", "nemotron", "seed_oss",
    "smollm3", "starcoder2", "ernie4_5", "mixtral", "qwen2_moe", "olmoe", "glm4_moe",
)  # fmt: skip
"""Model types with which mlx-lm was run, and computed what the weights of its layout are."""
REFUSED_BY_MLX = ("qwen3_moe", "ernie4_5_moe", "deepseek_v3")
"""Model types of which mlx-lm refuses some quantized layers."""
