"""Checks of a layer among the others of its list: what it lacks, and what it has in another type or shape."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from mxcli.files.tensors import TensorInfo
from mxcli.flows.verify.checks.check import PROBLEM, WARNING, Check, Finding, some
from mxcli.flows.verify.checks.expected import Expected
from mxcli.flows.verify.checks.siblings import PEERS
from mxcli.flows.verify.checks.text_model import NUMBERED
from mxcli.flows.verify.subject import Subject

FEW = 0.25
"""The share of layers that may be odd; of more, they are another kind."""
_RENAMED = 2
"""More parts of its own make a layer another kind."""
_WHOLE_MODULE = 3
"""Tensors of a module that is missing as a whole, from which on the layer may be of another kind."""
_OF_THE_FIRST = re.compile(r"relative_attention_bias|\.pre_ln\.|\.rel_attn_embed\.")
"""Parts that the first layer holds for all: of T5, RWKV and WavLM."""
_LACKED = {
    kind: part
    for part, kinds in {
        r"(^|\.)blocks\.\d+\.expansion\.": "align align_vision_model efficientnet",
        r"(^|\.)blocks\.\d+\.identity\.": "efficientloftr",
        r"\.(attention_input\.query|\w+_message_gate\..*)$": "inkling2 inkling2_text inkling2_loop inkling2_loop_text",
        r"(^|\.)layers\.0\.attn_norm\.": "modernbert modernbert-decoder",
        r"\.block\.\d+\.nin_shortcut\.": "chameleon emu3 janus janus_vqgan",
    }.items()
    for kind in kinds.split()
}
"""Parts that single layers of some model types lack, where the model itself is not known."""
_OF_A_STAGE = re.compile(r"(\d+)\.(?=\d+\.)")
"""The number of a stage before that of the layer in it."""
Parts = frozenset[str]


@dataclass(frozen=True)
class Layers:
    """The tensors of a checkpoint by list of layers, number of the layer, and the rest of their names; and those that
    its model is `expected` to have."""

    subject: Subject
    expected: Expected

    @cached_property
    def stacks(self) -> dict[str, dict[int, dict[str, TensorInfo]]]:
        """The plain tensors, and the scales of activations, without what one layer holds for all."""
        view, checkpoint = self.subject.view, self.subject.checkpoint
        tensors = dict(checkpoint.tensors if view is None else view.tensors)
        if view is not None:
            tensors |= {name: checkpoint.tensors[name] for name in view.unused}
        found: dict[str, dict[int, dict[str, TensorInfo]]] = {}
        for name, info in tensors.items():
            match = NUMBERED.match(name)
            if match is None or name in self.subject.transforms.tensors or _OF_THE_FIRST.search(name):
                continue
            stack, rest = match["stack"], name[match.start("number") :]
            while stage := _OF_A_STAGE.match(rest):
                stack, rest = f"{stack}.{stage[1]}", rest[stage.end() :]
            number, _, part = rest.partition(".")
            found.setdefault(stack, {}).setdefault(int(number), {})[part] = info
        return found

    @property
    def may_vary(self) -> bool:
        """True if the configuration states a list of what the layers are."""
        return bool(
            {"block_configs", "layers_block_type", "hybrid_override_pattern"}
            & set(self.subject.checkpoint.config or {})
        )

    def is_by_design(self, stack: str, number: int, part: str) -> bool:
        """Return whether a layer lacks a part since the model has none there."""
        view = self.subject.view
        infos = (parts[part] for parts in self.stacks[stack].values() if part in parts)
        # The model has no scales of activations.
        is_parameter = view is None or all(info.name in view.tensors for info in infos)
        name = f"{stack}.{number}.{part}"
        lacked = _LACKED.get(str((self.subject.checkpoint.config or {}).get("model_type")))
        return is_parameter and ((lacked is not None and bool(re.search(lacked, name))) or self.expected.lacks(name))


def _incomplete(layers: Layers) -> Iterator[Finding]:
    """Yield the parts of most layers that few layers lack, which have nothing instead, or what no other layer has; not
    what the model has none of, if it is known."""
    for stack, by_number in layers.stacks.items():
        sets = {number: frozenset(parts) for number, parts in by_number.items()}
        usual, count = max(Counter(sets.values()).items(), key=lambda item: (item[1], len(item[0])))
        for number, parts in sorted(sets.items()):
            if not _is_odd(number, sets, usual, count):
                continue
            own = parts - usual
            instead = f"; it has {some(sorted(own))}, which no other layer has" if own else ""
            for part in sorted(usual - parts):
                if layers.is_by_design(stack, number, part) or not _may_judge(layers, sets, number, usual - parts):
                    continue
                yield Finding(
                    f"{stack}.{number}.{part}",
                    f"missing; {count:,} of {len(sets):,} layers have it{instead}",
                    "the parts of the other layers",
                    "Copy it from the source: mxcli verify … --against SOURCE --repair.",
                )


def _is_odd(number: int, sets: Mapping[int, Parts], usual: Parts, count: int) -> bool:
    """Return whether few layers are like this one, and it lacks some of what most have, with little instead."""
    parts = sets[number]
    alike = [other for other, each in sets.items() if each == parts]
    few = len(alike) <= max(1, FEW * len(sets)) and (count > 1 or len(sets) == 2) and not _is_periodic(alike, sets)
    own = parts - usual
    replaced = any(own & each for other, each in sets.items() if other != number) or len(own) > _RENAMED
    return few and not replaced and len(parts & usual) * 2 > len(usual)


def _is_periodic(numbers: list[int], all_numbers: Mapping[int, Parts]) -> bool:
    """Return whether layers are every second, every third and so on of their list."""
    if len(numbers) < 2:
        return False
    first, second = sorted(numbers)[:2]
    step = second - first
    return step > 1 and set(numbers) == {each for each in all_numbers if each % step == first % step}


def _may_judge(layers: Layers, sets: Mapping[int, Parts], number: int, missing: Parts) -> bool:
    """Return whether siblings say that a layer lacks something: where the model is not known, not if its layers vary,
    nor if a whole module is missing, in one of two layers or in the first or last of stages."""
    if not layers.may_vary and layers.expected.is_usual:
        return True
    if layers.expected.is_known:
        return True
    modules = {part.partition(".")[0] for part in missing}
    has_others = any(part.partition(".")[0] in modules for part in frozenset.intersection(*sets.values()))
    is_module = len(modules) == 1 and not has_others and len(missing) >= _WHOLE_MODULE
    is_end = number in (min(sets), max(sets)) and any(map(NUMBERED.match, sets[number]))
    return not layers.may_vary and not (is_module and (len(sets) == 2 or is_end))


def _odd_headers(layers: Layers) -> Iterator[Finding]:
    """Yield the one plain tensor that has another dtype or shape than its siblings."""
    for stack, by_number in layers.stacks.items():
        for part in {part for parts in by_number.values() for part in parts}:
            infos = {number: parts[part] for number, parts in by_number.items() if part in parts}
            if any(info.name in layers.subject.weights for info in infos.values()) or len(infos) < PEERS:
                continue
            headers = {number: (info.dtype, info.shape) for number, info in infos.items()}
            (usual, count), *_ = Counter(headers.values()).most_common(1)
            odd = [number for number, header in headers.items() if header != usual]
            if len(odd) == 1 and count == len(headers) - 1:
                info = infos[odd[0]]
                if info.dtype == usual[0] and layers.expected.has_shape(info.name, info.shape):
                    continue
                yield Finding(
                    f"{stack}.{odd[0]}.{part}",
                    f"{info.dtype} {list(info.shape)}",
                    f"{usual[0]} {list(usual[1])}, as in all {count:,} siblings",
                    "Compare with --against SOURCE.",
                )


LAYER_CHECKS: tuple[Check[Layers], ...] = (
    Check(
        "incomplete_layer",
        PROBLEM,
        "layers that lack what the others have",
        "the parts of every layer against those of most, and against the model that transformers builds of config.json "
        "unless all layers of its type are alike; without it, layers with other parts instead, one of two, or the "
        "first or last stage, with a whole module less, and every second, third and so on are another kind",
        _incomplete,
    ),
    Check(
        "odd_header",
        WARNING,
        "a plain tensor with another dtype or shape than the same one in all other layers",
        "dtype and shape against the siblings",
        _odd_headers,
    ),
)
