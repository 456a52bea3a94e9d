"""Weights that are stored stacked or transposed: which dimension each sums over, as the code of its model reads it.

Rows are facts of transformers 5.24, diffusers 0.42 and vLLM 0.32. What the shapes of a stack itself show comes first: a
model type may exist in both orders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from mxcli.files.models.names import Config, names_of_model, parts_of
from mxcli.files.tensors import TensorInfo

LAST, BEFORE_LAST = -1, -2
MATRIX, STACK, MATRICES = range(2, 3), range(3, 4), range(2, 65)


@dataclass(frozen=True, slots=True)
class StackRow:
    """Weights that are stacked or stored [in, out]: their names (a regex, searched), the dimension they sum over, why,
    the models they are in (none: all), and their numbers of dimensions. `alternates`: rows of gate and up alternate, so
    halves of the stack are not gate and up. `role` is what they are for."""

    name: str
    axis: int
    reason: str
    models: frozenset[str] = frozenset()
    dims: range = STACK
    alternates: bool = False
    role: str = "weight"


@dataclass(frozen=True, slots=True)
class Orientation:
    """The dimension that a layer sums over, LAST or BEFORE_LAST, and why; assumed unless it is `known`."""

    axis: int
    reason: str
    known: bool = True


UNKNOWN = Orientation(LAST, "orientation not known: [expert, out, in] is assumed", known=False)
LINEAR = Orientation(LAST, "linear layers are stored [out, in]")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CONV1D = _words("gpt2 gpt-sw3 openai-gpt imagegpt decision_transformer jais clvp clvp_decoder")
GPT_OSS = _words("gpt_oss")
IN_OUT = _words(
    "llama4 llama4_text qwen3_vl_moe qwen3_vl_moe_text aria aria_text openai_privacy_filter "
    "NucleusMoEImageTransformer2DModel"
)
OUT_IN = _words(
    """
    afmoe axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_ocr2 deepseek_ocr2_text deepseek_v2 deepseek_v3
    deepseek_v32 deepseek_v4 diffusion_gemma diffusion_gemma_text dots1 dots3_note dots3_note_text ernie4_5_moe
    ernie4_5_vl_moe ernie4_5_vl_moe_text exaone_moe flex_olmo flint gemma4 gemma4_text glm4_moe glm4_moe_lite glm4v_moe
    glm4v_moe_text glm5_next glm5_next_text glm_moe_dsa granitemoe granitemoe_swa granitemoehybrid granitemoeshared
    hunyuan_v1_moe hy_v3 hy_v4 hy_v4_vl hy_v4_vl_text inkling2 inkling2_loop inkling2_loop_text inkling2_text
    inkling_mm_model inkling_text jamba kimi_linear kolibri1 laguna lara_mini lfm2_moe longcat_flash mellum
    mimo_v2_flash minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text mistral4 mistral_large4 mistral_large4_text
    mixtral muse_spark muse_spark_text nemo_speechlm nemotron_h nemotron_h_omni olmoe phimoe qwen2_moe qwen3_5_moe
    qwen3_5_moe_text qwen3_moe qwen3_next qwen3_omni_moe qwen3_omni_moe_talker_text qwen3_omni_moe_text
    qwen3_omni_moe_thinker qwen4_exp qwen4_exp_text sarvam_mla sarvam_moe solar_open step3p5 step3p7 unlimited_ocr
    unlimited_ocr_text zaya
    """
)
INKLING = _words("inkling_mm_model inkling_text inkling2 inkling2_text inkling2_loop inkling2_loop_text")
PER_CODEBOOK = _words("moshi moshi_depth kyutai_speech_to_text")

_EXPERTS = r"(^|\.)(shared_)?experts\.(gate_up_proj|gate_proj|up_proj|down_proj)(\.weight)?$"
_IN_OUT, _OUT_IN = "these experts are stored [expert, in, out]", "these experts are stored [expert, out, in]"

# The first matching row decides.
ROWS = (
    StackRow(r"(^|\.)(c_attn|c_proj|c_fc|q_attn)\.weight$", BEFORE_LAST, "GPT-2 Conv1D layers are stored [in, out]",
             CONV1D, MATRICES),
    StackRow(r"(^|\.)kernel$", BEFORE_LAST, "Flax kernels are stored [in, out]", dims=MATRICES),
    StackRow(r"_exps\.weight$", LAST, "GGUF stacks are stored [expert, out, in]"),
    StackRow(r"(^|\.)experts\.mlp\.(w1|v1)$", LAST, "w1 and v1 of all experts are stored below each other, [out, in]",
             dims=range(2, 4)),
    StackRow(r"(^|\.)experts\.mlp\.w2$", BEFORE_LAST, "w2 of all experts are stored below each other, each [in, out]",
             dims=range(2, 4)),
    StackRow(_EXPERTS, BEFORE_LAST, _IN_OUT, GPT_OSS, alternates=True),
    StackRow(_EXPERTS, BEFORE_LAST, _IN_OUT, IN_OUT),
    StackRow(r"(^|\.)experts\.fc[12]\.weight$", BEFORE_LAST, _IN_OUT, IN_OUT),
    StackRow(r"(^|\.)experts\.(gate_and_up|down)_projs$", BEFORE_LAST, _IN_OUT, _words("nemo_speechlm")),
    StackRow(_EXPERTS, LAST, _OUT_IN, OUT_IN),
    StackRow(r"(^|\.)moe\.(gate|up|down)_proj\.weight$", LAST, _OUT_IN, _words("step3p5 step3p7 step3_text step3_vl")),
    StackRow(r"(^|\.)(input|output)_linear\.weight$", LAST, _OUT_IN,
             _words("jetmoe granitemoe granitemoe_swa granitemoehybrid granitemoeshared")),
    StackRow(r"(^|\.)(shared_)?w13_weight$", LAST, _OUT_IN, INKLING, alternates=True),
    StackRow(r"(^|\.)(shared_)?w2_weight$", LAST, _OUT_IN, INKLING),
    StackRow(r"(^|\.)(fc1|fc2|linear|input_projections|lm_heads)\.weight$", LAST,
             "a matrix for each codebook, [codebook, out, in]", PER_CODEBOOK),
    StackRow(r"(^|\.)codebooks_head\.weight$", BEFORE_LAST, "a head for each codebook, [codebook, in, out]",
             _words("csm csm_depth_decoder_model"), role="lm_head"),
    StackRow(r"(^|\.)(intermediate|output)\.dense\.weight$", BEFORE_LAST, "grouped layers are stored [group, in, out]",
             _words("convbert"), role="other"),
    StackRow(r"(^|\.)(input|recurrent)_gate_weight$", BEFORE_LAST, "gates of heads are stored [head, in, out]",
             _words("recurrent_gemma"), role="other"),
)  # fmt: skip

_PART = re.compile(
    r"(.*?)(?:(gate_up_proj|fc1|input_linear|w13_weight|gate_and_up_projs)|(gate_proj|up_proj)"
    r"|(down_proj|fc2|output_linear|w2_weight|down_projs))(\.weight)?"
)
_SECOND = {
    "gate_up_proj": "down_proj",
    "fc1": "fc2",
    "input_linear": "output_linear",
    "w13_weight": "w2_weight",
    "gate_and_up_projs": "down_projs",
}
"""The two parts of a stack whose first one holds gate and up."""
_FIRST = {second: first for first, second in _SECOND.items()}


def stack_row(name: str, shape: tuple[int, ...], models: frozenset[str]) -> StackRow | None:
    """Return the row of a weight that is stacked or stored [in, out] in one of the models, or None; a convolution has
    none."""
    return _row(_NUMBER.sub("0", name), len(shape), models)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@lru_cache(maxsize=1 << 12)
def _row(name: str, dims: int, models: frozenset[str]) -> StackRow | None:
    for row in ROWS:
        if dims in row.dims and (not row.models or row.models & models) and re.search(row.name, name):
            return row
    return None


@dataclass(frozen=True, slots=True)
class Orientations:
    """Orientations of a source's weights: they follow from its tensors, the names of its model, and the hidden sizes
    that the configuration states."""

    tensors: Mapping[str, TensorInfo]
    models: frozenset[str]
    hidden_sizes: frozenset[int]

    def of(self, info: TensorInfo) -> Orientation:
        """Return the dimension that a layer sums over.

        For a stack of experts, the hidden size decides if exactly one dimension equals it, in the stack or in the other
        part of it; then the shapes of both parts, as gate and up are twice as long as down; else the rows for the
        models.
        """
        dims = len(info.shape)
        shown = self._shown(info) if dims == 3 else None
        if shown is not None:
            return shown
        row = stack_row(info.name, info.shape, self.models) if dims > 1 else None
        if row is not None:
            return Orientation(row.axis, row.reason)
        return UNKNOWN if dims == 3 and "." in info.name and not info.layer else LINEAR

    def _shown(self, info: TensorInfo) -> Orientation | None:
        """Return the orientation of a stack that its own shapes show, or None."""
        part = _PART.fullmatch(info.name)
        if part is None:
            return None
        other = _other_part(part, self.tensors)
        for each in (info, other):
            axis = None if each is None else _by_hidden_size(each, self.hidden_sizes)
            if axis is not None:
                return Orientation(axis, "the dimension of hidden_size shows how it is stored")
        axis = _by_lengths(*((other, info) if part[4] else (info, other)))
        return None if axis is None else Orientation(axis, "the shapes of both parts show how it is stored")


def orientations(tensors: Mapping[str, TensorInfo], config: Config | None) -> Orientations:
    """Return the orientations of a source's weights; without a configuration, shapes show the Conv1D layers of
    GPT-2."""
    sizes = (part.get("hidden_size") for part in parts_of(config))
    hidden = frozenset(size for size in sizes if isinstance(size, int))
    models = names_of_model(config)
    return Orientations(tensors, models | {"gpt2"} if stores_conv1d(tensors) else models, hidden)


def alternates(info: TensorInfo, config: Config | None) -> bool:
    """Return whether rows of gate and up alternate in a stack."""
    row = stack_row(info.name, info.shape, names_of_model(config))
    return row is not None and row.alternates


def stores_conv1d(tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether the shapes of fused attention weights show GPT-2's [in, out] order: then they are three times as
    wide as long."""
    return any(
        len(info.shape) == 2 and info.shape[1] == 3 * info.shape[0]
        for name, info in tensors.items()
        if name.endswith(".c_attn.weight") and _FUSED.search(name)
    )


_FUSED = re.compile(r"(^|\.)h\.\d+\.attn\.c_attn\.weight$")


def _other_part(part: re.Match[str], tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """Return the other part of a stack: down_proj of gate_up_proj, and the reverse."""
    name = _SECOND.get(part[2] or "") or _FIRST.get(part[4] or "")
    other = None if name is None else tensors.get(f"{part[1]}{name}{part[5] or ''}")
    return other if other is not None and len(other.shape) == 3 else None


def _by_hidden_size(info: TensorInfo, hidden: frozenset[int]) -> int | None:
    part = _PART.fullmatch(info.name)
    last, before = (size in hidden for size in (info.shape[-1], info.shape[-2]))
    if last == before or part is None:
        return None
    return LAST if last == (part[4] is None) else BEFORE_LAST


def _by_lengths(first: TensorInfo | None, second: TensorInfo | None) -> int | None:
    """Return the dimension by the shapes of gate with up, and of down: both orders never fit the same shapes."""
    if first is None or second is None or not all(first.shape):
        return None
    (before, last), (down_before, down_last) = first.shape[-2:], second.shape[-2:]
    if (before, last) == (2 * down_last, down_before):
        return LAST
    return BEFORE_LAST if (before, last) == (down_last, 2 * down_before) else None
