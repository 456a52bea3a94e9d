"""Sets of layers that engines join into one matrix, as their own tables have them: they need one tensor scale, and one
decision.

Rows are facts of the packed and stacked mappings of the model classes of vLLM 0.32 and SGLang 0.5.23, of vLLM's
fusing of models that it runs with the code of transformers, and of diffusers' fused projections.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from mxcli.errors import UsageError, printable
from mxcli.files.models.names import Config, names_of_model, title_of_model
from mxcli.files.models.served import DIFFUSERS, ENGINES, SERVED

CROSS = (
    r"(?i)(^|[._])(cross_?att\w*|enc(oder)?_?(dec_?)?att\w*|xattn|attn2|src_attn|second_sub_layer|image_pooling\w*)"
    r"(\.|$)"
)
"""Paths of cross-attention: its q has another input than its k and v."""


@dataclass(frozen=True, slots=True)
class FusedRow:
    """A set: the last parts of its members' module paths, and where it holds.

    What comes before the last part, an expert's number included, is the same for all members: it matches `within` and
    not `outside` (regexes, searched; empty: any). `models` are those that it holds for (none: all), `apart` those that
    keep the layers apart.
    """

    members: tuple[str, ...]
    within: str = ""
    outside: str = ""
    models: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()

    def holds_for(self, models: frozenset[str]) -> bool:
        """Return whether the set is joined in a model that goes by the names."""
        return (not self.models or bool(self.models & models)) and not self.apart & models

    def holds_in(self, parent: str) -> bool:
        """Return whether the set is joined in a module."""
        return (not self.within or _compiled(self.within).search(parent) is not None) and (
            not self.outside or _compiled(self.outside).search(parent) is None
        )


_compiled = cache(re.compile)


def _in(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _attention(*members: str) -> tuple[FusedRow, ...]:
    """Return the rows of q, k and v: of cross-attention only k and v are joined."""
    return FusedRow(members, outside=CROSS), FusedRow(members[1:], within=CROSS)


_DELTA = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj", "g_proj", "f_proj")

_DELTA_MODELS = _in(
    "kimi_linear kimi_k3 KimiK3ForConditionalGeneration KimiK3LinearForCausalLM glm5_next glm5_next_text "
    "Glm5NextForCausalLM bailing_moe_v3 BailingMoeV3ForCausalLM BailingMoeV3VLForConditionalGeneration"
)
"""The linear attention layers of these models (gated delta rule) are joined with their gates."""

# In a module, the first row takes its members.
ROWS = (
    FusedRow(("to_q", "to_k", "to_v"), within=r"(^|\.)attn2$",
             models=_in("SD3Transformer2DModel SD3ControlNetModel")),
    FusedRow(_DELTA, models=_DELTA_MODELS),
    FusedRow(("f_b_proj", "g_b_proj"), models=_DELTA_MODELS),
    FusedRow(("q_proj", "k_proj", "v_proj", "g_proj"), within=r"(^|\.)linear_attn$", models=_in("olmo_hybrid")),
    FusedRow(("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"),
             models=_in("jet_nemotron JetNemotronForCausalLM JetVLMForConditionalGeneration")),
    FusedRow(("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj"),
             models=_in("minimax_m3 minimax_m3_vl minimax_m3_vl_text MiniMaxM3SparseForCausalLM")),
    FusedRow(("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
             models=_in("kimi_k3 KimiK3ForConditionalGeneration dots3_note dots3_note_text")),
    FusedRow(("w2", "w1"), models=_in("qwen QWenLMHeadModel QwenVLForConditionalGeneration")),
    FusedRow(("fc1", "fc3"), models=_in("aimv2 aimv2_vision_model dots_ocr DotsOCRForCausalLM ovis2 ovis2_vision Ovis "
                                        "ovis2_5 Ovis2_5")),
    FusedRow(("key_proj", "value_proj"), within=r"(^|\.)ple$", models=_in("qwen4_exp qwen4_exp_text")),
    FusedRow(("input_mix_weight_down", "block_inject_weight"), within=r"(^|\.)hyper_connection$"),
    FusedRow(("wkv", "wgate"), within=r"(^|\.)compressor$"),
    FusedRow(("gate_proj", "dense_h_to_4h"), within=r"(^|\.)linear_proj$"),
    *_attention("q_proj", "k_proj", "v_proj"),
    *_attention("q", "k", "v"),
    *_attention("wq", "wk", "wv"),
    *_attention("to_q", "to_k", "to_v"),
    FusedRow(("query", "key", "value"), outside=rf"{CROSS}|(?i:qformer)"),
    FusedRow(("key", "value"), within=CROSS, outside=r"(?i)qformer"),
    *_attention("query_proj", "key_proj", "value_proj"),
    *_attention("q_lin", "k_lin", "v_lin"),
    *_attention("query_net", "key_net", "value_net"),
    *_attention("add_q_proj", "add_k_proj", "add_v_proj"),
    FusedRow(("q_a_proj", "kv_a_proj_with_mqa"),
             apart=_in("minicpm3 MiniCPM3ForCausalLM sarvam_mla SarvamMLAForCausalLM")),
    FusedRow(("wq_a", "wkv")),
    FusedRow(("wq_du", "wk_dv", "wv_dv", "wr_du")),
    FusedRow(("in_proj_qkv", "in_proj_z")),
    FusedRow(("in_proj_b", "in_proj_a")),
    FusedRow(("gate_proj", "up_proj")),
    FusedRow(("c_fc_0", "c_fc_1")),
    FusedRow(("attn_q", "attn_k", "attn_v")),
    FusedRow(("ffn_gate", "ffn_up")),
    FusedRow(("w1", "w3")),
    FusedRow(("wi_0", "wi_1")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FusedSets:
    """The sets of one model: its rows, the first of which take their members, and the tables they are from.

    `known`: the model is in those tables; else its layers are taken as joined by their usual names, and `note` says
    that.
    """

    rows: tuple[FusedRow, ...]
    known: bool
    source: str
    note: str | None = None

    def among(self, columns: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
        """Return the sets with two members or more among weights, given with their columns, by names such as
        `model.layers.0.self_attn.q_proj+k_proj+v_proj`.

        Weights with different numbers of columns have different inputs, so they form no set.
        """
        modules: dict[str, dict[str, str]] = {}
        places: dict[str, list[int]] = {}
        for at, row in enumerate(self.rows):
            for last in row.members:
                places.setdefault(last, []).append(at)
        for name in columns:
            module, _, parameter = name.rpartition(".")
            parent, _, last = module.rpartition(".")
            if parameter == "weight" and last in places:
                modules.setdefault(parent, {})[last] = name
        found: dict[str, tuple[str, ...]] = {}
        for parent, layers in modules.items():
            if len(layers) > 1:
                rows = sorted({at for last in layers for at in places[last]})
                found |= self._in_module(parent, layers, rows, columns)
        order = {name: at for at, name in enumerate(columns)}
        return dict(sorted(found.items(), key=lambda item: order[item[1][0]]))

    def keys(self, columns: Mapping[str, int]) -> dict[str, str]:
        """Return the name of the set of every weight that is in one."""
        return {name: key for key, names in self.among(columns).items() for name in names}

    def joined_with(self, more: Iterable[Sequence[str]]) -> FusedSets:
        """Return these sets and `more`, which are joined with those of any module that they have a member in common
        with."""
        rows = list(self.rows)
        for members in more:
            met = [row for row in rows if not row.within and not set(row.members).isdisjoint(members)]
            whole = tuple(dict.fromkeys(chain(members, *(row.members for row in met))))
            rows = [FusedRow(whole), *(row for row in rows if row not in met)]
        return replace(self, rows=tuple(rows))

    def _in_module(
        self, parent: str, layers: Mapping[str, str], rows: Iterable[int], columns: Mapping[str, int]
    ) -> dict[str, tuple[str, ...]]:
        """Return the sets of some rows among the layers of a module, given by the last parts of their paths."""
        left, found = dict(layers), {}
        for row in map(self.rows.__getitem__, rows):
            members = set(row.members).intersection(left)
            if len(members) < 2 or not row.holds_in(parent):
                continue
            names = tuple(name for last, name in layers.items() if last in members)
            if len({columns[name] for name in names}) == 1:
                key = "+".join(row.members)
                found[f"{parent}.{key}" if parent else key] = names
            for last in members:
                del left[last]
        return found


def fused_sets(config: Config | None, more: Iterable[Sequence[str]] = ()) -> FusedSets:
    """Return the sets of the model that a configuration names, and `more` joined to them."""
    models = names_of_model(config)
    rows = tuple(row for row in ROWS if row.holds_for(models))
    if config is not None and isinstance(config.get("_class_name"), str):
        sets = FusedSets(rows, True, DIFFUSERS)
    elif models & SERVED:
        sets = FusedSets(rows, True, ENGINES)
    else:
        sets = FusedSets(rows, False, "", _not_known(config))
    return sets.joined_with(more)


def _not_known(config: Config | None) -> str:
    title = title_of_model(config)
    model = "a model without a model type" if title is None else f"'{printable(title)}'"
    return (
        f"The layers that engines join in {model} are not known (it is not in the tables of {ENGINES}); q, k, v and "
        "gate, up are taken as joined, by their names."
    )


def named_sets(text: str) -> tuple[tuple[str, ...], ...]:
    """Return the sets that a user names, as in "q+k+v,gate+up": last parts of module paths. Raises UsageError for a set
    of fewer than two, and for a part that occurs twice."""
    sets = tuple(tuple(part.strip() for part in each.split("+")) for each in text.split(","))
    parts = [part for members in sets for part in members]
    if any(len(members) < 2 or not all(members) for members in sets) or any("." in part for part in parts):
        raise UsageError(
            f"--fuse '{printable(text)}': a set is the last parts of module paths joined by +, such as "
            "query_key+value; sets are separated by commas."
        )
    twice = sorted({part for part in parts if parts.count(part) > 1})
    if twice:
        raise UsageError(f"--fuse '{printable(text)}': {', '.join(map(printable, twice))} is in two sets.")
    return sets
