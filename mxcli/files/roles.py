"""Roles and tags of tensors by name, shape and dtype, as two tables.

Every tensor has one role; by default only `weight` is quantized. Tags locate it in the model, and a tensor may have
several. Both are selected as `@name`. To support a new spelling, edit one row here and its expectation in the tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from mxcli.files.tensors import DTYPES, TensorInfo

ACTIVATION, GRADIENT, WEIGHT, MTP = "activation", "gradient", "weight", "mtp"
SENSITIVE, VISION, AUDIO = "sensitive", "vision", "audio"
"""Roles of linear layers that are kept by default, by the model: what published recipes keep, and towers next to a
language model."""

WIDE, NARROW, EXPONENT, INTEGER, UNCODED = "wide", "narrow", "exponent", "integer", "uncoded"
ALL = (WIDE, NARROW, EXPONENT, INTEGER, UNCODED)
FLOAT = (WIDE, NARROW)

ANY, VECTOR, MATRIX, STACK = range(65), range(1, 2), range(2, 3), range(3, 4)
MATRICES, KERNELS = range(2, 65), range(3, 65)

NAME_END = 512
_NEVER_CODES = frozenset({"BOOL", "C64", "I64", "U64"})
"""Dtypes without fractions that no producer packs codes in."""


@dataclass(frozen=True, slots=True)
class RoleRow:
    """A role, its names (a regex, searched), why, and the dimension counts and dtype widths it covers."""

    role: str
    name: str
    reason: str
    dims: range = ANY
    widths: tuple[str, ...] = ALL


@dataclass(frozen=True, slots=True)
class TagRow:
    """A tag and the names it is found in (a searched regex)."""

    tag: str
    name: str


_ROUTERS = (
    r"(^|[._])(router|(shared_)?experts?_gate|gat(e|ing)_network)(\.|$)|(^|\.)ffn_gate_inp(_shexp)?\."
    r"|(^|\.)(mlp|moe|ffn|ffn_layer|feed_forward|\w+_moe|mixer)\.(gate|gate_fn|gating|switch)\."
)
_SHORT_ROUTERS = r"(^|\.)(moe|\w+_moe|moe_\w+)\.(w_?g|w_gate|gate_linear|gate_layer)(\.weight)?$"
_NORMS = (
    r"(?i)(^|\.)([^.]*norm(?!al(?!i[sz]))[^.]*|ln|ln[_\d][^.]*|[^.]*_ln\d*|([^.]*_)?bn\d*)\.(weight|gamma|scale|g)$"
)
_TABLES = (
    r"(?!patch)[^.]*(embed(ding)?s?|embd|(?<![^._])embs?)|(emb(ed(ding)?)?_(tokens|in|positions|code|text|layer))[^.]*"
    r"|positional_embed[^.]*|wte|wpe|shared|lut|pe|[^.]*(embedding_table|codebooks?)"
    r"|emb(ed(ding)?s?)?\.(word|tok(en)?s?|pos(ition)?s?|type)"
)
_EMBEDDINGS = rf"(^|\.)({_TABLES})(\.\d+)?(\.weights?)?$"
_HEADS = r"score|classifier|qa_outputs|v_head(\.summary)?|value_head|reward_head|classification_head|cls_head|reward"
_PARTS_OF_HEADS = r"dense|dense_proj|out_proj|linear\d?"
_OUTPUTS = (
    r"(out(put)?|codec|mlm|lm|vocab|token|prediction|logits?|text|audio)_head|unembed|to_logits|logits?(_proj|_layer)?"
    r"|output_(layer|projection)|generator(\.proj)?|vocab_proj(ection)?|final_proj|transformer\.ff_out"
)
"""Output heads outside numbered layers."""

# The first matching row decides.
ROLES = (
    RoleRow("lora", r"(^|[._])lora_|(^|[._])(hada_w|lokr_w)\d", "part of a LoRA adapter"),
    RoleRow(
        "buffer",
        r"(^|\.)(running_(mean|var)|num_batches_tracked|position_ids|token_type_ids|g_idx)$",
        "buffer",
    ),
    RoleRow(
        "buffer",
        r"inv_freq$|(^|\.)(freqs_cis|cos_cached|sin_cached)$|(^|\.)(rotary_(pos_)?emb|rope_freqs|rope_factors_\w+)\.",
        "rotary table",
    ),
    RoleRow("buffer", r"(^|\.)attn\.bias$", "stored causal mask", dims=MATRICES),
    RoleRow("buffer", r"(^|\.)((\w*_)?mask|masked_bias|alibi)$", "stored mask"),
    RoleRow("scale", r"(^|[._])(weight|input|output|activation|act|q|k|v|kv)_scale(_inv|_2|s)?$", "scale of codes"),
    RoleRow(
        "scale",
        r"_global_scale$|_per_tensor_scale$|_scale_inv$|_zero_point$|[._](qzeros|absmax|scales)$",
        "scale of codes",
    ),
    RoleRow("scale", r"\.scale_(weight|input)$", "scale of codes"),
    RoleRow("scale", r"", "powers of two", widths=(EXPONENT,)),
    RoleRow("codes", r"(_packed|_qdata|_blocks|[._]qweight)$", "packed codes", widths=(INTEGER, NARROW)),
    RoleRow("codes", r"(^|[._])weight$", "packed codes", dims=MATRICES, widths=(INTEGER,)),
    RoleRow("buffer", r"", "not a float tensor", widths=(INTEGER, UNCODED)),
    RoleRow(
        "embedding",
        r"relative_attention_bias|relative_position_bias_table|(^|\.)rel(ative)?_(pos|attn)[^.]*_bias\.weight$",
        "table of position biases",
    ),
    RoleRow("bias", r"(^|[._])bias(_(ih|hh)(_l\d+)?(_reverse)?|_[kv])?$|\.beta$", "bias"),
    RoleRow("router", _ROUTERS, "chooses experts"),
    RoleRow("router", _SHORT_ROUTERS, "chooses experts", dims=MATRIX),
    RoleRow("scale", r"\.scale$", "scale of codes", dims=MATRICES),
    RoleRow("lm_head", r"(^|[._])lm_heads?(\.\d+)?(\.(decoder|linear))?\.weight$", "output head"),
    RoleRow("lm_head", r"(^|\.)(embed_out|unembedding|vocab_projector|shared_head\.head)\.weight$", "output head"),
    RoleRow(
        "lm_head",
        r"^((language_)?model\.|transformer\.)*(output|head|proj_out)\.weight$",
        "output head",
        MATRICES,
    ),
    RoleRow("lm_head", r"(^|\.)cls\.predictions\.decoder\.weight$", "output head"),
    RoleRow("lm_head", rf"^(?!.*\.\d+\.)(.*\.)?({_OUTPUTS})\.weight$", "output head", MATRICES),
    RoleRow("lm_head", rf"^({_HEADS})(\.({_PARTS_OF_HEADS}))?\.weight$", "head of a task", MATRICES),
    RoleRow("lm_head", r"^(cls\.seq_relationship|[^.]*regression_head)\.weight$", "head of a task", MATRICES),
    RoleRow("lm_head", r"(^|\.)contact_head\.regression\.weight$", "head of a task", MATRICES),
    RoleRow("norm", _NORMS, "normalization"),
    RoleRow("conv", r"(^|\.)patch_embed|conv", "convolution", dims=KERNELS, widths=FLOAT),
    RoleRow("conv", r"(^|\.)(ssm_conv1d|shortconv\.conv)\.weight$", "convolution", dims=MATRIX),
    RoleRow("embedding", _EMBEDDINGS, "embedding table"),
    RoleRow("other", r"(^|\.)(A_log|D|[^.]*_tokens?|sinks|logit_scale)$", "model parameter"),
    RoleRow("norm", r"(^|[._])(weight|gamma|scale|g)$", "one value per channel", dims=VECTOR),
    RoleRow("codes", r"", "already in 8 bits or fewer", dims=MATRICES, widths=(NARROW,)),
    RoleRow(MTP, r"(^|\.)(mtp[^.]*|eh_proj)\.", "multi-token prediction layer", dims=MATRICES),
    RoleRow(WEIGHT, r"(^|[._])experts?\.|_exps\.weight$", "linear layers of experts", dims=range(2, 4)),
    RoleRow(WEIGHT, r"(^|[._])moe\.", "linear layers of experts", dims=STACK),
    RoleRow(WEIGHT, r"(^|[._])weight(_(ih|hh)(_l\d+)?(_reverse)?)?$|(^|\.)kernel$", "linear layer", dims=MATRIX),
    RoleRow("conv", r"(^|[._])(weight|kernel)$", "convolution", dims=KERNELS),
    RoleRow(WEIGHT, r"^[^.]+$", "matrix without a module name", dims=MATRICES),
    RoleRow("other", r"", "not named like a linear layer"),
)
TAGS = (
    TagRow("attn", r"(?i)(^|\.)[^.]*(attn|attention)[^.]*\."),
    TagRow("mlp", r"(?i)(^|\.)([^.]*(mlp|ffn|feed_?forward|DenseReluDense|moe|experts?)[^.]*|intermediate)\."),
    TagRow("mlp", r"(^|\.)(layers?|blocks?|h)\.\d+\.(output\.dense|fc\d)\."),
    TagRow("expert", r"(^|\.)((local_|routed_)?experts?|expert_\d+)\.|moe\.(input|output)_linear\.|_exps\."),
    TagRow("shared_expert", r"(^|\.)shared_experts?\.|_shexp\."),
    TagRow("router", _ROUTERS),
    TagRow(MTP, r"(^|\.)(mtp[^.]*|eh_proj)\."),
    TagRow(VISION, r"(?i)(^|\.)(visual|vision|vision_[^.]*|vit|image_encoder|(multi_modal|mm)_projector)\."),
    TagRow(AUDIO, r"(?i)(^|\.)(audio|speech)(_[^.]*)?\."),
)
ALIASES = {"embedding": "embed"}

SELECTABLE = frozenset(
    {ACTIVATION, GRADIENT, SENSITIVE, *(row.role for row in ROLES), *(row.tag for row in TAGS), *ALIASES.values()}
)


def role_of(name: str, shape: tuple[int, ...], dtype: str) -> str:
    """Return the role of a tensor; "other" if no row matches it."""
    return role_row(name, shape, dtype).role


def role_row(name: str, shape: tuple[int, ...], dtype: str) -> RoleRow:
    """Return the row of ROLES that decides; plans print its reason."""
    return _first_row(_template(name), len(shape), _width(dtype))


def reason_of(info: TensorInfo) -> str:
    """Return why a tensor has its role, in words; empty if neither its model nor its name says."""
    row = role_row(info.name, info.shape, info.dtype)
    return info.reason or (row.reason if row.role == info.role else "")


def tags_of(name: str, role: str) -> frozenset[str]:
    """Return every `@name` that selects a tensor: its role, the role's alias and its tags."""
    return _tags(_template(name)) | {role, ALIASES.get(role, role)}


def mtp_prefixes(names: Iterable[str]) -> frozenset[str]:
    """Return the prefixes, such as `model.layers.61.`, of blocks that are MTP layers only because they hold an
    `eh_proj`."""
    found = (re.match(r"(.*\.\d+\.)eh_proj\.", name) for name in names if ".eh_proj." in name)
    return frozenset(match[1] for match in found if match)


def _template(name: str) -> str:
    """Return the end of the name with numeric segments made equal, so that layers and experts share one look-up."""
    return _NUMBERS.sub("0", name[-NAME_END:])


_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")


@lru_cache(maxsize=len(DTYPES))
def _width(dtype: str) -> str:
    row = DTYPES[dtype]
    if dtype == "F8_E8M0":
        return EXPONENT
    if not row.is_float:
        return UNCODED if dtype in _NEVER_CODES else INTEGER
    return WIDE if row.bits > 8 else NARROW


@lru_cache(maxsize=1 << 16)
def _first_row(name: str, dims: int, width: str) -> RoleRow:
    for row in ROLES:
        if dims in row.dims and width in row.widths and re.search(row.name, name):
            return row
    raise AssertionError("the last row matches everything")


@lru_cache(maxsize=1 << 16)
def _tags(name: str) -> frozenset[str]:
    return frozenset(row.tag for row in TAGS if re.search(row.name, name))
