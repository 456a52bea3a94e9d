"""Models that serving engines have classes for: model types and, of models with their own code, architectures."""

from __future__ import annotations

ENGINES = "vLLM 0.32 and SGLang 0.5.23"
DIFFUSERS = "diffusers 0.42"

MODEL_TYPES = frozenset(
    """
    afmoe apertus arcee arctic aria aria_text audioflamingo3 axk1 aya_vision baichuan bailing_hybrid bailing_moe
    bamba beam bert blip-2 bloom chameleon chatglm clip cohere cohere2 cohere2_moe cohere2_vision cohere_asr
    cohere_compass colmodernvbert colpali cosmos3_edge cwm dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32
    deepseek_v4 deepseek_v41 deepseek_vl_v2 diffusion_gemma dots1 dots3_note dots3_note_text dots_ocr
    embedding_gemma2 emu3 ernie ernie4_5 ernie4_5_moe ernie4_5_vl_moe exaone exaone4 exaone4_5 exaone_moe falcon
    falcon_h1 falcon_mamba flex_olmo fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4
    gemma4_assistant gemma4_text gemma4_unified gemma4_unified_assistant gemma4_unified_text glm glm4 glm4_moe
    glm4_moe_lite glm4v glm4v_moe glm4v_moe_text glm4v_text glm5_next glm5_next_text glm_moe_dsa glm_ocr glmasr
    gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granite4_vision granite_speech granite_speech_plus
    granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared grok-1 gte hrm_text hunyuan
    hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hy_v3 hy_v4 hy_v4_vl hy_v4_vl_text hyperclovax idefics3
    inkling_mm_model inkling_text internlm internlm2 internlm3 internvl internvl_chat iquestcoder jais jais2 jamba
    jet_nemotron kimi_k2 kimi_k25 kimi_k3 kimi_linear kimi_vl laguna lfm2 lfm2_moe lfm2_vl llama llama4 llama4_text
    llava llava_next llava_next_video llava_onevision llava_qwen longcat_flash longcat_flash_ngram mamba mamba2
    mellum mimo_v2_flash minicpm minicpm3 minicpmo minicpmv minicpmv4_6 minicpmv4_7 minimax minimax_m2 minimax_m3
    minimax_m3_vl minimax_m3_vl_text minimax_text_01 ministral3 mistral mistral3 mixtral mllama mllama_text_model
    modernbert molmo molmo2 moss_transcribe_diarize mpt muse_glimmer muse_glimmer_assistant muse_spark
    muse_spark_text musicflamingo nemotron nemotron-h nemotron-nas nemotron_h nemotron_h_omni nomic_bert olmo olmo2
    olmo3 olmo_hybrid olmoe openai_privacy_filter openpangu opt orion ovis2_5 paddleocr_vl paligemma pangu_v2_moe
    param2moe persimmon phi phi3 phi3_v phi4_multimodal phi4mm phimoe pixtral plamo2 plamo3 qianfan_ocr qwen qwen2
    qwen2_5_omni qwen2_5_omni_thinker qwen2_5_vl qwen2_5_vl_text qwen2_audio qwen2_moe qwen2_vl qwen2_vl_text qwen3
    qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe
    qwen3_omni_moe_text qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text qwen4_exp
    qwen4_exp_text roberta sarvam_mla sarvam_moe sdar sdar_moe seed_oss shieldgemma2 siglip skywork_chat smollm3
    smolvlm solar stablelm starcoder2 step3_text step3_vl step3p5 step3p7 telechat telechat2 vaultgemma
    vibevoice_asr voxtral whisper xlm-roberta xverse zamba2 zaya
    """.split()  # noqa: SIM905 - a page of words, not a column
)
ARCHITECTURES = frozenset(
    """
    AquilaForCausalLM AquilaModel ArcticForCausalLM BagelForConditionalGeneration BaiChuanForCausalLM
    BaichuanForCausalLM BailingMM2NativeForConditionalGeneration BailingMMNativeForConditionalGeneration
    BailingMoEForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM BailingMoeV2_5ForCausalLM
    BailingMoeV3ForCausalLM BailingMoeV3VLForConditionalGeneration BeeForConditionalGeneration
    BertSpladeSparseEmbeddingModel BgeM3EmbeddingModel ChatGLMForConditionalGeneration ChatGLMModel Cheers
    CheersForConditionalGeneration ClefOmniForJointSchema ColBERTJinaRobertaModel ColBERTLfm2Model
    ColBERTModernBertModel ColQwen3 ColQwen3_5 Contriever Cosmos3ForConditionalGeneration DeciLMForCausalLM
    DeepseekForCausalLM DeepseekOCR2ForCausalLM DeepseekOCRForCausalLM DeepseekV3BidirectionalModel
    DeepseekV41ForCausalLM DeepseekV4ForConditionalGeneration DeepseekVL2ForCausalLM DeepseekVLV2ForCausalLM
    DonutForConditionalGeneration DotsOCRForCausalLM DotsVLMForCausalLM EmbeddingGemmaModel Ernie4_5_ForCausalLM
    ExaoneForCausalLM ExaoneMoEForCausalLM Fairseq2LlamaForCausalLM FireRedASR2ForConditionalGeneration
    FireRedLIDForConditionalGeneration FunASRForConditionalGeneration FunAudioChatForConditionalGeneration
    GLM4VForCausalLM GigaChat35ForCausalLM Glm5NextForCausalLM GlmImageForConditionalGeneration GritLM
    Grok1ForCausalLM Grok1ModelForCausalLM GteNewForSequenceClassification GteNewModel H2OVLChatModel
    HCXVisionForCausalLM HCXVisionV2ForCausalLM IQuestCoderForCausalLM IQuestLoopCoderForCausalLM
    IQuestQ1ForCausalLM InternLM2ForCausalLM InternLM2ForRewardModel InternLM2VEForCausalLM InternLM3ForCausalLM
    InternLMForCausalLM InternS1ForConditionalGeneration InternS1ProForConditionalGeneration
    InternS2MobiusForConditionalGeneration InternS2PreviewForConditionalGeneration InternVLChatModel
    IsaacForConditionalGeneration JAISLMHeadModel JetNemotronForCausalLM JetVLMForConditionalGeneration
    JinaEmbeddingsV5Model JinaForRanking JinaVLForRanking K2HorizonForCausalLM KananaVForConditionalGeneration
    KeyeForConditionalGeneration KeyeVL1_5ForConditionalGeneration KimiK25ForConditionalGeneration
    KimiK3ForConditionalGeneration KimiK3LinearForCausalLM KimiVLForConditionalGeneration LLaDA2MoeModelLM
    LLaMAForCausalLM Lfm2BidirectionalModel LightOnOCRForConditionalGeneration
    LlamaBidirectionalForSequenceClassification LlamaBidirectionalModel LlamaEmbeddingModel
    LlamaNemotronVLForSequenceClassification LlamaNemotronVLModel Llama_Nemotron_Nano_VL LlavaLlamaForCausalLM
    LlavaMistralForCausalLM LlavaOnevision2ForConditionalGeneration LlavaQwenForCausalLM LlavaVidForCausalLM
    LocateAnythingForConditionalGeneration LongcatFlashNgramForCausalLM MPTForCausalLM
    MantisForConditionalGeneration MiDashengLMModel MiMoForCausalLM MiMoV2ASRForCausalLM MiMoV2ForCausalLM
    MiMoV2OmniForCausalLM MindSporeForCausalLM MiniCPMForCausalLM MiniCPMO MiniCPMSALAForCausalLM MiniCPMV
    MiniMaxM1ForCausalLM MiniMaxM3SparseForCausalLM MiniMaxText01ForCausalLM MiniMaxVL01ForConditionalGeneration
    MistralLarge3ForCausalLM MolmoForCausalLM Moondream3ForCausalLM MoonshotKimiaForCausalLM MossAudioModel
    MossVLForConditionalGeneration MotifForCausalLM MultiModalityCausalLM MuseGlimmerForCausalLM
    NVILAForConditionalGeneration NVILALiteForConditionalGeneration NVLM_D NanbeigeForCausalLM
    NanbeigeForSequenceClassification NemotronHPuzzleForCausalLM NemotronH_Nano_Omni_Reasoning_V3
    NemotronH_Nano_VL_V2 NemotronH_Super_Omni_Reasoning_V3 NemotronParseForConditionalGeneration
    OpenCUAForConditionalGeneration OpenPanguVLForConditionalGeneration OpenVLAForActionPrediction OpsColQwen3Model
    OrionForCausalLM OuroForCausalLM Ovis Ovis2_5 Ovis2_6ForCausalLM Ovis2_6_MoeForCausalLM POINTSV15ChatModel
    PanguEmbeddedForCausalLM PanguProMoEV2ForCausalLM PanguUltraMoEForCausalLM Param2MoEForCausalLM
    Phi3SmallForCausalLM Phi3VForCausalLM Phi4FlashForCausalLM Phi4ForCausalLMV Phi4MMForCausalLM PhiMoEForCausalLM
    PixtralForConditionalGeneration Plamo2ForCausalLM Plamo3ForCausalLM QWenLMHeadModel QuantMixtralForCausalLM
    Qwen2ForProcessRewardModel Qwen2ForRewardModel Qwen2_5OmniModel Qwen3ASRForcedAlignerForTokenClassification
    Qwen3ASRRealtimeGeneration Qwen3ForRewardModel Qwen3VLNemotronEmbedModel QwenVLForConditionalGeneration
    RForConditionalGeneration RWForCausalLM Rnj1ForCausalLM SDARForCausalLM SDARMoeForCausalLM
    Sarashina2VisionForCausalLM SarvamMLAForCausalLM SarvamMoEForCausalLM SkyworkR1VChatModel SolarForCausalLM
    Spark2_5ForCausalLM StableLMEpochForCausalLM Step1ForCausalLM Step3TextForCausalLM
    Step3VLForConditionalGeneration Step3p5ForCausalLM StepVLForConditionalGeneration
    Tarsier2ForConditionalGeneration TarsierForConditionalGeneration TeleChat2ForCausalLM TeleChat3ForCausalLM
    TeleChatForCausalLM TeleFLMForCausalLM UltravoxModel UnlimitedOCRForCausalLM VoxtralRealtimeGeneration
    VoyageQwen3BidirectionalEmbedModel XllmForCausalLM XverseForCausalLM XverseMoeForCausalLM YiVLForCausalLM
    """.split()  # noqa: SIM905 - a page of words, not a column
)
SERVED = MODEL_TYPES | ARCHITECTURES
"""Names of models in the tables of the engines."""
