"""compressed-tensors, as llm-compressor writes it and vLLM, SGLang and transformers read it.

Readers of NVFP4 compute `codes * (scale / global scale)` in binary32; a rule that scales back by `scale * (1 /
global scale)` gives the same but for the last bit, so what is read back follows the readers. FP8 scales are BF16
where the rule rounds them to it, else F32, which transformers rounds to the dtype that it loads the model in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from mxcli.errors import InputError, printable, together
from mxcli.files.layouts.layout import (
    WEIGHT,
    Config,
    Content,
    Entry,
    Layout,
    OnDisk,
    Weight,
    check_fit,
    found_weights,
    matrix_refusal,
    module_of,
    scale_shape,
)
from mxcli.files.layouts.parts import CODES, ENCODE, SCALES
from mxcli.files.layouts.schemes import SCHEMES, Scheme
from mxcli.numerics.blocks import packed_columns
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.recipe import Recipe, resolve
from mxcli.numerics.rounding import ScaleRecipe

VERSION = "0.20.0"
MIXED = "mixed-precision"
SCALE = ".weight_scale"


def _refusal(weight: Weight) -> str | None:
    if weight.format.name not in SCHEMES:
        return f"it has no {weight.format.name}"
    return matrix_refusal(weight)


def _contents(weight: Weight) -> tuple[Content, ...]:
    row, (rows, columns) = weight.format, weight.shape
    packed = row.element.stored_bits < 8
    codes_dtype, ending = ("U8", "_packed") if packed else ("F8_E4M3", "")
    codes = Entry(weight.name + ending, codes_dtype, (rows, packed_columns(row, columns)))
    scales = Entry(weight.name + "_scale", _scale_dtype(weight), scale_shape(weight))
    found = (Content(codes, CODES), Content(scales, SCALES))
    if row.tensor_scale is None:
        return found
    return (*found, Content(Entry(weight.name + "_global_scale", "F32", (1,)), ENCODE))


def _scale_dtype(weight: Weight) -> str:
    rule = weight.recipe.scale_rule
    if isinstance(rule, ScaleRecipe) and rule.bf16_scale:
        return "BF16"
    return SCHEMES[weight.format.name].scale_dtype


def _settings(weights: Sequence[Weight], ignored: Sequence[str]) -> dict[str, object]:
    """All layers of one format are the target `Linear`; of several, each group names its modules."""
    modules: dict[str, list[str]] = {}
    for weight in weights:
        modules.setdefault(weight.format.name, []).append(module_of(weight))
    mixed = len(modules) > 1
    groups = {
        f"group_{place}": {**SCHEMES[name].group, "targets": sorted(modules[name]) if mixed else ["Linear"]}
        for place, name in enumerate(sorted(modules))
    }
    return {
        "quant_method": "compressed-tensors",
        "format": MIXED if mixed else SCHEMES[next(iter(modules))].format,
        "quantization_status": "compressed",
        "version": VERSION,
        "config_groups": groups,
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _weights(disk: OnDisk) -> list[Weight]:
    groups = _groups(disk.settings)
    return found_weights(disk, SCALE, lambda module: _weight(module, _scheme_of(module, groups), disk))


def _weight(module: str, scheme: Scheme, disk: OnDisk) -> Weight:
    """The weight of a module; raises ValueError where its tensors are not what the scheme stores."""
    row = FORMATS[scheme.ours]
    name = module + WEIGHT
    codes = name + ("_packed" if row.element.stored_bits < 8 else "")
    if codes not in disk.tensors:
        raise ValueError(f"has a weight_scale, but {printable(codes)} is missing ({scheme.format})")
    packed = disk.tensors[codes].shape
    shape = (*packed[:-1], packed[-1] * 8 // row.element.stored_bits) if packed else ()
    weight = Weight(name, shape, _decoding(scheme, disk.tensors[name + "_scale"].dtype), disk.dtype)
    fault = _refusal(weight)
    if fault:
        raise ValueError(f"{list(packed)} is no shape of {scheme.format}: {fault}")
    check_fit(_contents(weight), disk.tensors, scheme.format)
    return weight


def _decoding(scheme: Scheme, scale_dtype: str) -> Recipe:
    """A recipe that scales back as readers of this layout do."""
    dialect = "compressed-tensors-bf16" if scale_dtype == "BF16" else "compressed-tensors"
    return resolve(scheme.ours, dialect=dialect)


def _groups(settings: Config) -> list[tuple[Sequence[str], Scheme]]:
    """Targets and scheme of every config group; raises InputError for a scheme that is none of SCHEMES."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise InputError("config.json: its quantization_config needs config_groups to say what the codes mean.")
    found: list[tuple[Sequence[str], Scheme]] = []
    problems = []
    for name, group in groups.items():
        args = group.get("weights") if isinstance(group, Mapping) else None
        targets = group.get("targets") if isinstance(group, Mapping) else None
        scheme = next((row for row in SCHEMES.values() if isinstance(args, Mapping) and row.means(args)), None)
        if scheme is None or not isinstance(targets, list):
            problems.append(
                f"config.json: config group {printable(name)}: its weights are none of the schemes that can be read "
                f"back ({', '.join(SCHEMES)})."
            )
        else:
            found.append((list(map(str, targets)), scheme))
    if problems:
        raise together(InputError, "config.json", problems)
    return found


def _scheme_of(module: str, groups: Iterable[tuple[Sequence[str], Scheme]]) -> Scheme:
    """The group that targets a module by name or pattern, else the one that targets a class."""
    by_class = None
    for targets, scheme in groups:
        if any(_targets(target, module) for target in targets):
            return scheme
        if any(target.isidentifier() and target[0].isupper() for target in targets):
            by_class = by_class or scheme
    if by_class is None:
        raise ValueError("no config group targets it")
    return by_class


def _targets(target: str, module: str) -> bool:
    """Whether a target names a module or, after `re:`, matches its beginning."""
    if not target.startswith("re:"):
        return target == module
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error as error:
        raise ValueError(f"the target '{printable(target)}' is no regular expression: {error}") from error


def _remarks(weights: Sequence[Weight]) -> list[str]:
    notes = []
    if any(weight.dtype != "F32" and _scale_dtype(weight) == "F32" for weight in weights):
        notes.append(
            "FP8 scales are binary32: vLLM keeps them so, transformers rounds them to the dtype it loads a model in."
        )
    wide = {weight.dtype for weight in weights if weight.format.scale.bits != 32} - {"BF16"}
    if wide:
        notes.append(
            f"compressed-tensors decodes FP4, FP6 and MXFP8 in BF16: load this {', '.join(sorted(wide))} model with "
            "dtype=bfloat16."
        )
    return notes


COMPRESSED_TENSORS = Layout(
    name="compressed-tensors",
    meaning="what vLLM, SGLang and transformers load: codes, scales and a quantization_config per module",
    source="compressed-tensors 0.20, llm-compressor 0.14",
    formats=tuple(SCHEMES),
    refusal=_refusal,
    contents=_contents,
    settings=_settings,
    weights=_weights,
    aliases=("ct",),
    dialects=("compressed-tensors",),
    needs_config=True,
    remarks=_remarks,
    model_scales=True,
)
