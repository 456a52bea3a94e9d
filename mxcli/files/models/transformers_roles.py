"""Parameters of the models of transformers 5.24.0 whose names alone do not tell what they are.

Made by tests/files/built_models.py from the classes of the modules; not edited by hand. A line of ROLES has a
role and the end of a name (`^`: the whole name), a line of TOWERS a sense and a module next to the language model; the
model types follow, indented.
"""

VERSION = "5.24.0"
TYPES = """
    afmoe aimv2 aimv2_vision_model albert align altclip apertus apertus1p5 apertus1p5_text arcee aria aria_text
    audio-spectrogram-transformer audioflamingo3 audioflamingo3_encoder axk1 axk2 bailing_hybrid bamba bark bart
    beam beit bert bert-generation big_bird bigbird_pegasus biogpt bit bitnet blenderbot blenderbot-small blip
    blip-2 blip_2_qformer bloom blt bridgetower bros camembert canary canine chinese_clip
    chinese_clip_vision_model chmv2 clap clip clip_text_model clip_vision_model clipseg clvp codegen cohere
    cohere2 cohere2_moe cohere2_vision cohere_asr cohere_compass_vision colmodernvbert colpali colqwen2 convbert
    convnext convnextv2 cosmos3_edge cosmos3_edge_text cosmos3_edge_vision cosmos3_omni cpmant csm ctrl cvt cwm
    d_fine dac data2vec-audio data2vec-text data2vec-vision deberta deberta-v2 decision_transformer deepseek_v2
    deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl deepseek_vl_hybrid deimv2 deit depth_anything depth_pro dia
    diffllama dinov2 dinov2_with_registers dinov3_convnext dinov3_vit distilbert doge donut-swin dory dots3_note
    dots3_note_text dpr dpt edgetam_video efficientloftr efficientnet electra embedding_gemma2
    embedding_gemma2_text encodec encoder-decoder ernie ernie4_5 ernie4_5_moe ernie4_5_vl_moe esm esmc eurobert
    evolla exaone exaone4 exaone4_5 exaone4_5_vision exaone_moe falcon falcon_h1 falcon_mamba
    fastspeech2_conformer fastspeech2_conformer_with_hifigan flaubert flava flex_olmo flint florence2 fnet
    focalnet fsmt fun_asr_nano fun_asr_nano_encoder funnel fuyu gemma gemma2 gemma3 gemma3_text gemma3n_audio
    gemma3n_text gemma4 gemma4_audio gemma4_text gemma4_unified gemma4_unified_assistant gemma4_unified_text
    gemma4_vision git glm glm4 glm46v glm4_moe glm4_moe_lite glm4v glm4v_moe glm4v_moe_text glm4v_moe_vision
    glm4v_text glm4v_vision glm5_next glm5_next_text glm5_next_vision glm_image glm_image_text glm_image_vision
    glm_image_vqmodel glm_moe_dsa glm_ocr glm_ocr_text glm_ocr_vision glmasr glmasr_encoder glmga glpn got_ocr2
    gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj gradium_phonon_tts granite
    granite_docling granite_docling_text granite_docling_vision granite_speech granite_speech5_ctc
    granite_speech5_encoder granite_speech_plus granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared grounding-dino groupvit gte helium hgnet_v2 hiera higgs_audio_v2 hrm_text hubert
    hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_vision hy_v3 hy_v4 hy_v4_vl hy_v4_vl_text hy_v4_vl_vision
    hyperclovax hyperclovax_vision_v2 ibert idefics idefics2 idefics3 idefics3_vision ijepa imagegpt inkling2
    inkling2_loop inkling2_loop_text inkling2_text inkling2_vision inkling_mm_model inkling_text instructblip
    instructblipvideo internlm3 internvl internvl_vision iquestcoder jais2 jamba janus jetmoe jev
    jina_embeddings_v3 kimi_k25 kimi_k25_vision kimi_linear kolibri1 kosmos-2 kosmos-2.5 kyutai_speech_to_text
    laguna lara_mini lasr_ctc lasr_encoder layoutlm layoutlmv3 led levit lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl
    lfm3_vl_vision lightglue lighton_ocr lilt llama llama4 llama4_text llava llava_next llava_next_video
    llava_onevision longcat_flash longformer longt5 luke lw_detr lw_detr_vit lxmert m2m_100 mamba mamba2 marian
    markuplm mask2former maskformer maskformer-swin mbart megatron-bert mellum metaclip_2 mgp-str mimi
    mimi_decoder mimi_encoder mimo_v2_flash minicpm3 minicpm_ocr minicpm_ocr_vision minicpmv4_6 minicpmv4_7
    minicpmv4_7_vision minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral ministral3 mistral mistral3
    mistral4 mistral_large4 mistral_large4_text mixtral mlcd mlcd_vision_model mllama mm-grounding-dino
    mobilebert mobilenet_v1 mobilenet_v2 mobilevit mobilevitv2 modernbert modernbert-decoder modernvbert molmo2
    molmo2_text moonshine moshi moss_transcribe_diarize moss_transcribe_diarize_audio mpnet mpt mra mt5
    muse_glimmer muse_glimmer_assistant muse_glimmer_text muse_glimmer_vision muse_spark muse_spark_audio
    muse_spark_text muse_spark_vision musicflamingo musicgen musicgen_melody mvp nanochat nemo_speechlm nemotron
    nemotron3_5_asr nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_audio
    nemotron3_5_transcribe_word_timestamp nemotron3_diarization nemotron3_diarization_audio
    nemotron_asr_streaming nemotron_asr_streaming_encoder nemotron_h nemotron_h_omni neomme neucodec nllb-moe
    nomic_bert nystromformer olmo olmo2 olmo3 olmo_hybrid olmoe omniasr omniasr_audio omniasr_ctc oneformer
    openai-gpt openai_privacy_filter opt ovis2 owlv2 owlvit paddleocr_vl paligemma parakeet_ctc parakeet_encoder
    parakeet_rnnt parakeet_tdt patchtsmixer patchtst pe_audio pe_audio_encoder pegasus pegasus_x perceiver
    persimmon phi phi3 phi4_multimodal phimoe pi0 pix2struct pixio pixtral plbart pocket_tts
    pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder poolformer
    pop2piano pp_chart2table pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 pp_formulanet pp_lcnet pp_lcnet_v3
    pp_lcnet_v4 pp_ocrv5_mobile_det pp_ocrv5_mobile_rec pp_ocrv5_server_rec pp_ocrv6_small_det
    pp_ocrv6_small_rec pp_ocrv6_tiny_rec prompt_depth_anything prophetnet pvt pvt_v2 qianfan_ocr
    qianfan_ocr_vision qwen2 qwen2_5_omni qwen2_5_omni_thinker qwen2_5_vl qwen2_5_vl_text qwen2_5_vl_vision
    qwen2_audio qwen2_audio_encoder qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text
    qwen3_5_moe_vision qwen3_5_text qwen3_5_vision qwen3_asr qwen3_asr_encoder qwen3_moe qwen3_next
    qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_moe_vision qwen3_vl_text
    qwen3_vl_vision qwen4_exp_vision radio recurrent_gemma reformer regnet rembert resnet rf_detr rf_detr_dinov2
    roberta roberta-prelayernorm roc_bert roformer rt_detr rt_detr_resnet rt_detr_v2 rwkv sam sam2
    sam2_hiera_det_model sam2_video sam2_vision_model sam3 sam3_lite_text sam3_lite_text_text_model sam3_tracker
    sam3_tracker_video sam3_video sam3_vision_model sam3_vit_model sam_hq sam_hq_vision_model sam_vision_model
    sapiens2 sarvam_mla sarvam_moe seamless_m4t seamless_m4t_v2 seed_oss segformer seggpt sew sew-d shieldgemma2
    siglip siglip2 siglip2_vision_model siglip_vision_model slanet slanext smollm3 smolvlm smolvlm_vision
    solar_open speech-encoder-decoder speech_to_text speecht5 splinter squeezebert stablelm starcoder2 step3p7
    superglue superpoint swiftformer swin swin2sr swinv2 switch_transformers t5 t5gemma t5gemma2 tapas textnet
    timesfm timesfm2_5 timesformer tipsv2 tipsv2_dpt tipsv2_text_model tipsv2_vision_model trocr tvp udop
    ultrabert ultravbert umt5 unispeech unispeech-sat univnet unlimited_ocr upernet uvdoc uvdoc_backbone
    vaultgemma vibevoice vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_decoder
    vibevoice_acoustic_tokenizer_encoder vibevoice_asr video_llama_3 video_llama_3_vision video_llava videomae
    videoprism videoprism_vision_model vilt vipllava vision-encoder-decoder vision-text-dual-encoder visual_bert
    vit vit_mae vit_msn vitdet vitpose vitpose_backbone vits vivit vjepa2 voxtral voxtral_encoder
    voxtral_realtime voxtral_realtime_encoder wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm wavtokenizer
    wavtokenizer_encoder whisper xclip xcodec xcodec2 xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod yolos
    yoso youtu zamba zamba2 zaya zoedepth
"""
ROLES = """
conv embed.weight
    neucodec wavtokenizer xcodec2
embedding HashBucketCodepointEmbedder_0.weight
    canine
embedding HashBucketCodepointEmbedder_1.weight
    canine
embedding HashBucketCodepointEmbedder_2.weight
    canine
embedding HashBucketCodepointEmbedder_3.weight
    canine
embedding HashBucketCodepointEmbedder_4.weight
    canine
embedding HashBucketCodepointEmbedder_5.weight
    canine
embedding HashBucketCodepointEmbedder_6.weight
    canine
embedding HashBucketCodepointEmbedder_7.weight
    canine
embedding audio_bos_eos_token.weight
    qwen2_5_omni qwen2_5_omni_thinker
embedding column_embedder.weight
    kosmos-2.5 pix2struct
embedding embed_audio_tokens.weight
    csm higgs_audio_v2
embedding embed_char.weight
    seamless_m4t_v2
embedding embed_global.weight
    pegasus_x
embedding embed_text_tokens.weight
    csm
embedding embed_timestep.weight
    decision_transformer
embedding encoder.weight
    inkling_mm_model
embedding freq_emb.weight
    timesfm
embedding hq_token.weight
    sam_hq
embedding input_embeds_layer.weight
    bark clvp
embedding input_embeds_layers.0.weight
    bark
embedding iou_token.weight
    edgetam_video sam sam2 sam2_video sam3_tracker sam3_tracker_video sam3_video sam_hq
embedding lm_head.weight
    pi0
embedding mask_tokens.weight
    edgetam_video sam sam2 sam2_video sam3_tracker sam3_tracker_video sam3_video sam_hq
embedding obj_score_token.weight
    edgetam_video sam2 sam2_video sam3_tracker sam3_tracker_video sam3_video
embedding pe_k.weight
    speecht5
embedding position_embedding.pos_enc
    cohere_asr
embedding position_embeds_layer.weight
    bark clvp
embedding presence_token.weight
    sam3 sam3_lite_text sam3_video
embedding queries_embedder.weight
    mask2former maskformer oneformer
embedding queries_features.weight
    mask2former
embedding query_feat.weight
    lw_detr rf_detr
embedding reference_points.weight
    sam3 sam3_lite_text sam3_video
embedding row_embedder.weight
    kosmos-2.5 pix2struct
embedding scale.weight
    wavtokenizer
embedding segment_emb.weight
    kosmos-2.5
embedding shift.weight
    wavtokenizer
embedding token_type_embeddings_0.weight
    tapas
embedding token_type_embeddings_1.weight
    tapas
embedding token_type_embeddings_2.weight
    tapas
embedding token_type_embeddings_3.weight
    tapas
embedding token_type_embeddings_4.weight
    tapas
embedding token_type_embeddings_5.weight
    tapas
embedding token_type_embeddings_6.weight
    tapas
embedding visual_embeddings_table.weight
    ovis2
embedding w.weight
    ctrl
lm_head 0.weight
    pocket_tts yolos
lm_head ^action_in_proj.weight
    pi0
lm_head ^action_out_proj.weight
    pi0
lm_head ^action_time_mlp_in.weight
    pi0
lm_head ^action_time_mlp_out.weight
    pi0
lm_head ^answer_head.logit_fc.0.weight
    lxmert
lm_head ^bbox_embed.layers.0.weight
    lw_detr rf_detr
lm_head ^bpe_head.weight
    mgp-str
lm_head ^char_head.weight
    mgp-str
lm_head ^class_embed.weight
    lw_detr
lm_head ^classifier_distill.linear.weight
    levit
lm_head ^cls.weight
    ultrabert
lm_head ^cls_classifier.weight
    deit
lm_head ^ctc_head.weight
    omniasr_ctc
lm_head ^ctc_proj.weight
    unispeech
lm_head ^decoder.weight
    modernbert modernbert-decoder
lm_head ^dense.weight
    eurobert
lm_head ^discriminator_predictions.dense.weight
    electra
lm_head ^dist_head.weight
    swiftformer
lm_head ^distillation_classifier.weight
    deit
lm_head ^embedding_proj_layer.weight
    colmodernvbert colpali colqwen2
lm_head ^encoder_to_decoder.weight
    videomae
lm_head ^eos_head.weight
    pocket_tts
lm_head ^fc.weight
    textnet
lm_head ^feature_extractor.weight
    data2vec-audio unispeech-sat wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm
lm_head ^generator_predictions.dense.weight
    convbert electra
lm_head ^horizon_ff_layer.input_layer.weight
    timesfm
lm_head ^horizon_ff_layer.output_layer.weight
    timesfm
lm_head ^horizon_ff_layer.residual_layer.weight
    timesfm
lm_head ^itm_head.pooler.dense.weight
    flava
lm_head ^lm_head.dense.weight
    camembert data2vec-text esm gte ibert jina_embeddings_v3 longformer luke mpnet roberta roberta-prelayernorm
    xlm-roberta xlm-roberta-xl xmod
lm_head ^lm_head.out_proj.weight
    t5gemma2
lm_head ^lm_loss.weight
    xlnet
lm_head ^logits_dense.weight
    dia
lm_head ^logits_proj.weight
    flaubert xlm xlnet
lm_head ^loss_weighting.proj.weight
    pocket_tts
lm_head ^output_projection.weight
    biogpt trocr
lm_head ^output_projection_point.input_layer.weight
    timesfm2_5
lm_head ^output_projection_point.output_layer.weight
    timesfm2_5
lm_head ^output_projection_point.residual_layer.weight
    timesfm2_5
lm_head ^output_projection_quantiles.input_layer.weight
    timesfm2_5
lm_head ^output_projection_quantiles.output_layer.weight
    timesfm2_5
lm_head ^output_projection_quantiles.residual_layer.weight
    timesfm2_5
lm_head ^pooler.dense.weight
    deberta deberta-v2
lm_head ^post_projection.weight
    gemma4_unified_assistant
lm_head ^pre_classifier.weight
    distilbert mra nystromformer yoso
lm_head ^pre_projection.weight
    gemma4_unified_assistant
lm_head ^predictions.dense.weight
    albert
lm_head ^project_hid.weight
    unispeech unispeech-sat wav2vec2 wav2vec2-conformer
lm_head ^project_q.weight
    unispeech unispeech-sat wav2vec2 wav2vec2-conformer
lm_head ^projector.weight
    data2vec-audio hubert sew sew-d unispeech unispeech-sat wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm
lm_head ^qa_classifier.intermediate.dense.weight
    big_bird
lm_head ^qa_classifier.output.dense.weight
    big_bird
lm_head ^speaker_proj.weight
    unispeech-sat
lm_head ^state_proj.weight
    pi0
lm_head ^unembedding_projection.weight
    neomme
lm_head ^vocab_transform.weight
    distilbert
lm_head ^weight
    jev
lm_head ^wp_head.weight
    mgp-str
lm_head attr.weight
    lxmert
lm_head classifier.weight
    albert
lm_head decoder.weight
    albert flava luke ultravbert
lm_head dense.weight
    esmc funnel modernbert modernbert-decoder modernvbert
lm_head dense0.weight
    owlv2 owlvit
lm_head dense1.weight
    owlv2 owlvit
lm_head dense2.weight
    owlv2 owlvit
lm_head dense_prediction.weight
    electra funnel
lm_head depth_head.weight
    tipsv2_dpt
lm_head fc1.weight
    pp_ocrv6_tiny_rec
lm_head fc2.weight
    pp_ocrv6_tiny_rec
lm_head feat.weight
    lxmert
lm_head inverse_trans_compression.weight
    patchtsmixer
lm_head inverse_trans_expansion.weight
    patchtsmixer
lm_head layer0.weight
    cohere_asr
lm_head layers.0.weight
    gradium_phonon_tts
lm_head linear.weight
    patchtst wavtokenizer
lm_head linear1.weight
    ultrabert ultravbert
lm_head linear2.weight
    ultrabert ultravbert
lm_head linear_hidden.weight
    funnel
lm_head linear_out.weight
    funnel
lm_head logit_scale.weight
    owlv2 owlvit
lm_head logit_shift.weight
    owlv2 owlvit
lm_head map_scale_compression.weight
    patchtsmixer
lm_head map_scale_expansion.weight
    patchtsmixer
lm_head normals_head.weight
    tipsv2_dpt
lm_head obj.weight
    lxmert
lm_head out_eos.weight
    gradium_phonon_tts
lm_head out_proj.weight
    t5gemma
lm_head predictions.dense.weight
    mobilebert rembert
lm_head proj.weight
    flaubert gradium_phonon_tts xlm
lm_head projection.weight
    patchtsmixer patchtst
lm_head qa_outputs.weight
    big_bird
lm_head query_features_block.layers.0.weight
    rf_detr
lm_head query_features_proj.weight
    rf_detr
lm_head segmentation_head.weight
    tipsv2_dpt
lm_head seq_relationship.weight
    bert big_bird ernie flava fnet lxmert megatron-bert mobilebert visual_bert
lm_head summary.weight
    electra flaubert xlm xlnet
lm_head transform.dense.weight
    bert big_bird deberta deberta-v2 ernie flava fnet layoutlm luke lxmert megatron-bert mobilebert mra
    nomic_bert nystromformer roc_bert roformer squeezebert tapas visual_bert yoso
lm_head unembed.weight
    inkling2 inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model
lm_head weight_proj.weight
    unispeech unispeech-sat wav2vec2 wav2vec2-conformer
other ^class_pos_emb
    mlcd mlcd_vision_model
other ^hc_head_fn
    deepseek_v4
other ^label_embeddings_concat
    unispeech-sat
other ^mask_emb
    xlnet
other ^memory_temporal_positional_encoding
    edgetam_video sam2_video
other ^middle_cycle_cross_pass_kv_queries
    inkling2_loop_text
other ^middle_cycle_cross_pass_queries
    inkling2_loop_text
other ^no_memory_positional_encoding
    edgetam_video sam2_video
other ^no_object_pointer
    edgetam_video sam2_video
other ^occlusion_spatial_embedding_parameter
    edgetam_video sam2_video
other ^pos_embed_window
    sam2_hiera_det_model
other ^prompts_visual_projection
    xclip
other ^text_prompt
    tvp
other intermediate.dense.weight
    ibert
other key.weight
    ibert
other multi_modal_projector.mm_input_projection_weight
    gemma3 shieldgemma2 t5gemma2
other objective.weight
    data2vec-audio unispeech-sat wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm
other output.dense.weight
    ibert
other query.weight
    ibert
other value.weight
    ibert
router gate.weight
    mistral_large4 mistral_large4_text
weight ^class_embed.weight
    rf_detr
weight box_linear_embeddings.weight
    lilt
weight class_embed.0.weight
    d_fine deimv2 pp_doclayout_v2 pp_doclayout_v4 rt_detr rt_detr_v2
weight class_embed.weight
    oneformer pp_doclayout_v3
weight cond_embed.weight
    gradium_phonon_tts
weight decoder_embed.weight
    vit_mae
weight embedding.weight
    apertus1p5
weight enc_out_class_embed.0.weight
    lw_detr rf_detr
weight input_embedding.weight
    patchtst
weight k_sconv.weight_proj
    inkling2 inkling2_loop inkling2_loop_text inkling2_text
weight predictor_embeddings.weight
    vjepa2
weight relative_pos_embeddings.weight
    prophetnet
weight v_sconv.weight_proj
    inkling2 inkling2_loop inkling2_loop_text inkling2_text
weight xpath_unitseq2_embeddings.weight
    markuplm
"""
TOWERS = """
audio acoustic_tokenizer_encoder
    vibevoice_asr
audio audio_tokenizer
    apertus1p5
audio audio_tower
    audioflamingo3 dots3_note fun_asr_nano glmasr inkling_mm_model moss_transcribe_diarize muse_spark
    musicflamingo nemo_speechlm omniasr qwen2_5_omni_thinker qwen2_audio qwen3_asr qwen3_omni_moe_thinker
    vibevoice voxtral voxtral_realtime
audio diffusion_head
    vibevoice
audio encoder
    granite_speech granite_speech_plus
audio multi_modal_projector
    audioflamingo3 fun_asr_nano glmasr moss_transcribe_diarize musicflamingo nemo_speechlm omniasr qwen2_audio
    qwen3_asr vibevoice vibevoice_asr voxtral voxtral_realtime
audio projector
    granite_speech granite_speech_plus
audio semantic_connector
    vibevoice
audio semantic_tokenizer_encoder
    vibevoice vibevoice_asr
audio word_timestamp_encoder
    nemo_speechlm
vision aligner
    deepseek_vl deepseek_vl_hybrid janus
vision connector
    idefics2 idefics3 modernvbert smolvlm ultravbert
vision generation_aligner
    janus
vision generation_embeddings
    janus
vision generation_head
    janus
vision high_res_vision_model
    deepseek_vl_hybrid
vision high_res_vision_neck
    deepseek_vl_hybrid
vision high_res_vision_proj
    deepseek_vl_hybrid
vision image_encoder
    git
vision image_to_text_projection
    kosmos-2 kosmos-2.5
vision image_tower
    video_llava
vision img_processor
    phi4_multimodal
vision language_projection
    blip-2
vision merger
    minicpm_ocr minicpmv4_6 minicpmv4_7
vision mm_projector
    kimi_k25
vision multi_modal_projector
    aria cohere2_vision florence2 gemma3 got_ocr2 internvl lfm2_vl lfm3_vl llama4 llava llava_next
    llava_next_video llava_onevision minimax_m3_vl mistral3 mistral_large4 mllama molmo2 paligemma
    pp_chart2table qianfan_ocr shieldgemma2 step3p7 unlimited_ocr video_llava vipllava
vision projector
    cosmos3_edge hyperclovax_vision_v2 paddleocr_vl video_llama_3
vision qformer
    blip-2
vision resampler_model
    ernie4_5_vl_moe
vision video_tower
    video_llava
vision vision_adapter
    muse_glimmer muse_spark
vision vision_encoder
    lighton_ocr
vision vision_model
    blip-2 deepseek_vl deepseek_vl_hybrid granite_docling hyperclovax_vision_v2 idefics2 idefics3 janus kosmos-2
    kosmos-2.5 llama4 mllama modernvbert smolvlm step3p7 ultravbert video_llama_3
vision vision_projection
    lighton_ocr muse_glimmer muse_spark
vision vision_tokenizer
    apertus1p5
vision vision_tower
    aria cohere2_vision dots3_note ernie4_5_vl_moe florence2 gemma3 got_ocr2 hy_v4_vl inkling2 inkling2_loop
    inkling_mm_model internvl kimi_k25 lfm2_vl lfm3_vl llava llava_next llava_next_video llava_onevision
    minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 mistral_large4 molmo2 muse_glimmer muse_spark
    ovis2 paligemma pp_chart2table qianfan_ocr shieldgemma2 unlimited_ocr vipllava
vision visual
    cosmos3_edge cosmos3_omni exaone4_5 glm46v glm4v glm4v_moe glm5_next glm_ocr glmga paddleocr_vl
    qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
vision visual_embeddings_table
    ovis2
vision vqmodel
    janus
"""
