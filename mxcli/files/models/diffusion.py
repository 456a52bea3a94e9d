"""Layers of diffusion models that stay plain: what diffusers loads in FP32, and what published recipes keep.

Rows are facts of diffusers 0.42 (modules that its classes keep in FP32 or leave out of FP8 storage) and of the lists in
the diffusers examples of NVIDIA ModelOpt.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

FP32 = "diffusers 0.42, loaded in FP32"
STORAGE = "diffusers 0.42, left out of FP8 storage"
MODELOPT = "NVIDIA ModelOpt, examples of diffusers"
LIKE_OTHERS = "as in the lists for other diffusion models"

TIME_AND_TEXT, INPUT, OUTPUT = "embedding of time and text", "projection of the input", "projection of the output"
POSITIONS, CONVOLUTION, MODULATION = "embedding of positions", "convolution", "modulation by time and text"
EDGE = "first or last block"


@dataclass(frozen=True, slots=True)
class KeptRow:
    """Modules that stay plain: the classes they are in (a regex, matched in full), their paths (a regex, searched),
    why, and who says so.

    `edge` narrows it to the first and the last blocks of a list of blocks, that many at each end. Rows that are not
    `by_default` are kept by some recipes only.
    """

    classes: str
    modules: str
    why: str
    source: str
    edge: int = 0
    by_default: bool = True


def _parts(*names: str) -> str:
    """Return a regex for modules one part of whose path is one of the names."""
    return rf"(^|\.)({'|'.join(names)})(\.|$)"


_WAN = r"(Wan\w*|SkyReelsV2|ChronoEdit|AnyFlow\w*|Helios)Transformer3DModel"
_HUNYUAN = r"(HunyuanVideo\w*|HunyuanImage|MotifVideo)Transformer[23]DModel"

ROWS = (
    KeptRow(r".*", _parts("time_emb_proj", "time_embedding", "add_embedding", "time_text_embed", "time_guidance_embed"),
            TIME_AND_TEXT, MODELOPT),
    KeptRow(r".*", _parts("x_embedder", "context_embedder", r"patch_embed(ding)?"), INPUT, MODELOPT),
    KeptRow(r".*", _parts("pos_embed"), POSITIONS, MODELOPT),
    KeptRow(r".*", r"^(proj_in|patchify_proj)(\.|$)", INPUT, STORAGE),
    KeptRow(r".*", r"^(proj_out|final_layer)(\.|$)", OUTPUT, STORAGE),
    KeptRow(r".*", _parts("norm_out"), OUTPUT, MODELOPT),
    KeptRow(r".*", _parts("conv_in", "conv_out", "conv_shortcut"), CONVOLUTION, MODELOPT),
    KeptRow(r"Flux2?Transformer2DModel", _parts(r"(double|single)_stream_modulation\w*"), MODULATION, MODELOPT),
    KeptRow(r"\w*LTX\w*Transformer3DModel", _parts(r"\w*(time_embed|caption_projection|adaln_single)"), TIME_AND_TEXT,
            MODELOPT),
    KeptRow(r"\w*LTX\w*Transformer3DModel", r"^\w*proj_in(\.|$)", INPUT, MODELOPT),
    KeptRow(r"\w*LTX\w*Transformer3DModel", r"^\w*proj_out(\.|$)", OUTPUT, MODELOPT),
    KeptRow(r"\w*LTX\w*Transformer3DModel", r"^av_cross_attn_\w*(\.|$)", MODULATION, LIKE_OTHERS),
    KeptRow(r"\w*LTX\w*Transformer3DModel", r"^transformer_blocks", EDGE, MODELOPT, edge=3, by_default=False),
    KeptRow(_WAN, _parts("time_embedder", "time_embedding", "time_projection"), TIME_AND_TEXT, FP32),
    KeptRow(_WAN, _parts("scale_shift_table", "modulation", "motion_synthesis_weight", "history_key_scale"), MODULATION,
            FP32),
    KeptRow(_WAN, _parts("condition_embedder"), TIME_AND_TEXT, MODELOPT),
    KeptRow(_WAN, _parts("img_emb", r"\w*patch_embedding", r"patch_(short|mid|long)"), INPUT, STORAGE),
    KeptRow(_WAN, r"^blocks", EDGE, MODELOPT, edge=3, by_default=False),
    KeptRow(r"WanModel", _parts("text_embedding", "time_projection"), TIME_AND_TEXT, MODELOPT),
    KeptRow(r"WanModel", _parts("img_emb"), INPUT, STORAGE),
    KeptRow(r"WanModel", r"^head\.", OUTPUT, STORAGE),
    KeptRow(r"QwenImage\w*Transformer2DModel", r"^(img_in|txt_in)(\.|$)", INPUT, MODELOPT),
    KeptRow(r"QwenImage\w*Transformer2DModel", r"^transformer_blocks", EDGE, MODELOPT, edge=2, by_default=False),
    KeptRow(r"(CogVideoX|ConsisID)Transformer3DModel", _parts("ofs_embedding"), TIME_AND_TEXT, STORAGE),
    KeptRow(r"CogView[34]\w*Transformer2DModel|GlmImageTransformer2DModel", _parts("time_condition_embed"),
            TIME_AND_TEXT, STORAGE),
    KeptRow(r"(PixArt|Allegro|Sana\w*)Transformer\w*", _parts("adaln_single", "time_embed", "caption_projection"),
            TIME_AND_TEXT, STORAGE),
    KeptRow(r"AuraFlowTransformer2DModel", r"^time_step_proj(\.|$)", TIME_AND_TEXT, STORAGE),
    KeptRow(r"Lumina\w*", _parts("patch_embedder", "time_caption_embed"), TIME_AND_TEXT, STORAGE),
    KeptRow(r"ZImage\w*", _parts("t_embedder", "cap_embedder"), TIME_AND_TEXT, STORAGE),
    KeptRow(r"ZImage\w*", _parts("all_x_embedder"), INPUT, STORAGE),
    KeptRow(r"ZImage\w*", _parts("all_final_layer"), OUTPUT, STORAGE),
    KeptRow(r"BriaFibo2\w*", _parts("t_embedder"), TIME_AND_TEXT, STORAGE),
    KeptRow(r"Krea2\w*", _parts("time_embed"), TIME_AND_TEXT, STORAGE),
    KeptRow(r"Ideogram4\w*", _parts("t_embedding", "adaln_proj", "embed_image_indicator"), TIME_AND_TEXT, STORAGE),
    KeptRow(r"JoyImage\w*", _parts("time_embedder"), TIME_AND_TEXT, FP32),
    KeptRow(r"JoyImage\w*", _parts("img_in", "condition_embedder"), INPUT, STORAGE),
    KeptRow(r"Kandinsky[56]\w*", _parts("time_embeddings", "pooled_bias"), TIME_AND_TEXT, FP32),
    KeptRow(r"Kandinsky[56]\w*", _parts(r"((visual|text)_)?modulation"), MODULATION, FP32),
    KeptRow(r"Cosmos\w*", _parts("learnable_pos_embed"), POSITIONS, FP32),
    KeptRow(r"Cosmos\w*", _parts("time_embedder", "time_embed"), TIME_AND_TEXT, FP32),
    KeptRow(r"Cosmos\w*", _parts("embed_tokens", "patch_embed_base"), INPUT, STORAGE),
    KeptRow(r"MiniMaxH3\w*", _parts("time_embedder"), TIME_AND_TEXT, FP32),
    KeptRow(r"MiniMaxH3\w*", _parts("audio_proj_in"), INPUT, FP32),
    KeptRow(r"MiniMaxH3\w*", _parts("audio_proj_out"), OUTPUT, FP32),
    KeptRow(r"MiniMaxMusic3\w*", _parts("time_proj"), TIME_AND_TEXT, STORAGE),
    KeptRow(r"OmniGen\w*", _parts("patch_embedding", "embed_tokens"), INPUT, STORAGE),
    KeptRow(r"StableAudio\w*", _parts("preprocess_conv", "postprocess_conv"), CONVOLUTION, STORAGE),
    KeptRow(r"EasyAnimate\w*", r"^proj(\.|$)", INPUT, STORAGE),
    KeptRow(r"SanaWM\w*", _parts("plucker_embedder"), INPUT, STORAGE),
    KeptRow(r"HunyuanDiT\w*", _parts("pooler"), TIME_AND_TEXT, STORAGE),
    KeptRow(_HUNYUAN, _parts("x_embedder", r"context_embedder\w*"), INPUT, STORAGE),
    KeptRow(r"VQModel", _parts("quantize"), "codebook", STORAGE),
    KeptRow(r".*", _parts(r"\w*time(step)?_embed\w*", "t_embedder", "time_in"), TIME_AND_TEXT, LIKE_OTHERS),
    KeptRow(r".*", r"^(img_in|txt_in|x_embedders|context_embedders|condition_embedder)(\.|$)", INPUT, LIKE_OTHERS),
    KeptRow(r".*", r"^(final_linear|head|(audio_)?out_layer|audio_proj_out|proj_out_[12])(\.|$)", OUTPUT, LIKE_OTHERS),
    KeptRow(r"Flux3\w*", r"^\w*stream_modulations(\.|$)", MODULATION, LIKE_OTHERS),
    KeptRow(r".*", r"(^|\.)\w*norm\w*\.", "linear layer of an adaptive norm", STORAGE, by_default=False),
    KeptRow(r"(Autoencoder|AsymmetricAutoencoder)\w*", r"", "autoencoder", MODELOPT, by_default=False),
)  # fmt: skip


@lru_cache
def kept_by_recipe(class_name: str) -> tuple[KeptRow, ...]:
    """Return the rows of a class of diffusers, those of all classes included; the first that matches a module
    decides."""
    return tuple(row for row in ROWS if re.fullmatch(row.classes, class_name))


def kept_modules(class_name: str, modules: Iterable[str], *, by_default: bool = True) -> dict[str, KeptRow]:
    """Return the modules of a model that stay plain, each with the row that decides; with `by_default` False also what
    only some recipes keep."""
    names = list(modules)
    rows = [row for row in kept_by_recipe(class_name) if row.by_default or not by_default]
    found: dict[str, KeptRow] = {}
    for row in rows:
        matched = [name for name in names if re.search(row.modules, name)]
        for name in _at_the_edge(matched, row) if row.edge else matched:
            found.setdefault(name, row)
    return {name: found[name] for name in names if name in found}


def _at_the_edge(names: Iterable[str], row: KeptRow) -> list[str]:
    """Return the names in the first and the last blocks of their list."""
    blocks: dict[int, list[str]] = defaultdict(list)
    for name in names:
        number = re.search(rf"{row.modules}\.(\d+)\.", name)
        if number is not None:
            blocks[int(number[1])].append(name)
    ends = [at for at in blocks if at < row.edge or at > max(blocks) - row.edge]
    return [name for at in ends for name in blocks[at]]
