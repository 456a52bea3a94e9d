"""compressed-tensors, as llm-compressor writes it and vLLM, SGLang and transformers read it.

Readers of NVFP4 compute `codes * (scale / global scale)` in binary32; a rule that scales back by `scale * (1 / global
scale)` differs in the last bit only, so reading follows the readers. FP8 scales are BF16 if the rule rounds them to it,
else F32, which transformers rounds to the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mxcli.errors import printable
from mxcli.files.layouts.compressed_tensors_config import (
    CONFIG_SCHEMES,
    ConfigScheme,
    config_groups,
    schemes_of,
    transforms_of,
)
from mxcli.files.layouts.known_settings import COMPRESSED_TENSORS_SETTINGS
from mxcli.files.layouts.layout import (
    WEIGHT,
    Content,
    Entry,
    InputScale,
    Layout,
    OnDisk,
    Unread,
    UnreadFormat,
    Weight,
    check_fit,
    found_weights,
    matrix_refusal,
    module_of,
    scale_shape,
)
from mxcli.files.layouts.loaders import Hazard, Ignored, by_name_or_regex, listed
from mxcli.files.layouts.parts import CODES, ENCODE, SCALES, constant
from mxcli.files.layouts.targets import is_expert, read_targets, targets_of
from mxcli.numerics.blocks import packed_columns
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.mantissa_rules import MantissaScaleRule
from mxcli.numerics.scheme import Rules, Scheme, resolve

VERSION = "0.20.0"
MIXED = "mixed-precision"
SCALE = ".weight_scale"
ORDER = "_g_idx"


def _refusal(weight: Weight) -> str | None:
    if weight.format.name not in CONFIG_SCHEMES:
        return f"it has no {weight.format.name}"
    return matrix_refusal(weight)


def _contents(weight: Weight) -> tuple[Content, ...]:
    fmt, (rows, columns) = weight.format, weight.shape
    packed = fmt.element.stored_bits < 8
    codes_dtype, ending = ("U8", "_packed") if packed else ("F8_E4M3", "")
    codes = Entry(weight.name + ending, codes_dtype, (rows, packed_columns(fmt, columns)))
    scales = Entry(weight.name + "_scale", _scale_dtype(weight), scale_shape(weight))
    found = [Content(codes, CODES), Content(scales, SCALES)]
    if fmt.tensor_scale is not None:
        found.append(Content(Entry(weight.name + "_global_scale", "F32", (1,)), ENCODE))
    if weight.input_scale is not None:
        found.append(_input_scale(weight, weight.input_scale))
    return tuple(found)


def _input_scale(weight: Weight, scale: InputScale) -> Content:
    """Return the entry of the input scale, stored like the weight's: with a tensor scale, the one to divide by."""
    name = f"{module_of(weight)}.{CONFIG_SCHEMES[weight.format.name].input_scale}"
    if weight.format.tensor_scale is not None:
        return Content(Entry(name, "F32", (1,)), constant(scale.encode))
    return Content(Entry(name, _scale_dtype(weight), (1,)), constant(scale.decode))


def _scale_dtype(weight: Weight) -> str:
    """Return the dtype of a weight's scales; F16 as a variant is that of FP8 weights of F16 models."""
    if weight.variant:
        return weight.variant
    rule = weight.scheme.scale_rule
    if isinstance(rule, MantissaScaleRule) and rule.bf16_scale:
        return "BF16"
    return CONFIG_SCHEMES[weight.format.name].scale_dtype


def _settings(weights: Sequence[Weight], ignored: Sequence[str]) -> dict[str, object]:
    """Return the configuration: each group names its modules, and the group of experts comes first, since transformers
    takes the first one that names some."""
    modules: dict[str, list[str]] = {}
    for weight in weights:
        modules.setdefault(weight.format.name, []).append(module_of(weight))
    calibrated = {weight.format.name for weight in weights if weight.input_scale is not None}
    names = sorted(modules, key=lambda name: (not any(map(is_expert, modules[name])), name))
    groups = {}
    for index, name in enumerate(names):
        others = [module for other in names if other != name for module in modules[other]]
        targets = targets_of(modules[name], [*ignored, *others])
        group = CONFIG_SCHEMES[name].group(calibrated=name in calibrated)
        groups[f"group_{index}"] = {**group, "targets": targets}
    return {
        "quant_method": "compressed-tensors",
        "format": MIXED if len(modules) > 1 else CONFIG_SCHEMES[names[0]].format,
        "quantization_status": "compressed",
        "version": VERSION,
        "config_groups": groups,
        "ignore": sorted(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _weights(disk: OnDisk) -> list[Weight]:
    sparsity = disk.settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise Unread(
            f"config.json: its sparsity_config states {printable(sparsity['format'])}, which mxcli does not read."
        )
    groups = config_groups(disk.settings, is_ours=_is_ours(disk))
    scheme_of = schemes_of(groups)
    return found_weights(disk, SCALE, lambda module: _weight(module, scheme_of(module), disk))


def _weight(module: str, scheme: ConfigScheme, disk: OnDisk) -> Weight:
    """Return the weight of a module. Raises ValueError if its tensors are not what the scheme stores."""
    fmt = FORMATS[scheme.block_format]
    name = module + WEIGHT
    codes = name + ("_packed" if fmt.element.stored_bits < 8 else "")
    if codes not in disk.tensors:
        raise ValueError(f"has a weight_scale, but {printable(codes)} is missing ({scheme.format})")
    if name + ORDER in disk.tensors:
        raise UnreadFormat(f"its blocks are those of the order of columns in {printable(name + ORDER)}")
    packed = disk.tensors[codes].shape
    shape = (*packed[:-1], packed[-1] * 8 // fmt.element.stored_bits) if packed else ()
    dtype = disk.tensors[name + "_scale"].dtype
    variant = "F16" if dtype == "F16" and scheme.scale_dtype == "F32" else ""
    weight = Weight(name, shape, _decoding(scheme, dtype), disk.dtype, variant=variant)
    fault = _refusal(weight)
    if fault:
        raise ValueError(f"{list(packed)} is not a shape of {scheme.format}: {fault}")
    check_fit(_contents(weight), disk.tensors, scheme.format)
    return weight


def _decoding(scheme: ConfigScheme, scale_dtype: str) -> Scheme:
    """Return a scheme that scales back as readers of this layout do."""
    dialect = "compressed-tensors-bf16" if scale_dtype == "BF16" else "compressed-tensors"
    return resolve(scheme.block_format, Rules(dialect=dialect))


def _is_ours(disk: OnDisk) -> bool:
    """Return whether names and dtypes are those of FP4 or FP6 codes, regardless of the configuration."""
    bytes_of_scales = {name.removesuffix("_scale") for name in disk.tensors if _dtype_of(name, disk) == "U8"}
    packed = {name.removesuffix("_packed") for name in disk.tensors if name.endswith("weight_packed")}
    return bool(packed & bytes_of_scales) or any(name + "_global_scale" in disk.tensors for name in packed)


def _remarks(weights: Sequence[Weight]) -> list[str]:
    notes = []
    if any(weight.dtype != "F32" and _scale_dtype(weight) == "F32" for weight in weights):
        notes.append(
            "FP8 scales are binary32: vLLM keeps them so, transformers rounds them to the dtype it loads the model in."
        )
    wide = {weight.dtype for weight in weights if weight.format.scale.bits != 32} - {"BF16"}
    if wide:
        notes.append(
            f"compressed-tensors decodes FP4, FP6 and MXFP8 in BF16: load this {', '.join(sorted(wide))} model with "
            "dtype=bfloat16."
        )
    return notes


def _ignored(disk: OnDisk) -> Ignored:
    targets = read_targets((listed(group.get("targets")), True) for group in _groups(disk))
    return Ignored(
        "ignore",
        listed(disk.settings.get("ignore")),
        by_name_or_regex,
        "a module by its path, or by a regular expression after re: that matches its beginning",
        targeted=lambda module: targets.of(module) is not None,
    )


def _groups(disk: OnDisk) -> list[Mapping[str, object]]:
    groups = disk.settings.get("config_groups")
    return [group for group in (groups.values() if isinstance(groups, Mapping) else ()) if isinstance(group, Mapping)]


def _hazards(disk: OnDisk, weights: Sequence[Weight]) -> list[Hazard]:
    found = []
    if disk.settings.get("quantization_status") != "compressed":
        found.append(
            Hazard(
                "config.json",
                f"quantization_status is {printable(disk.settings.get('quantization_status'))}",
                "'compressed': with anything else transformers silently initializes the weights again",
                "Set it in the quantization_config.",
            )
        )
    typed = [weight for weight in weights if _dtype_of(weight.name + "_scale", disk) == "F8_E8M0"]
    found += [
        Hazard(
            printable(weight.name + "_scale"),
            "F8_E8M0",
            "U8: transformers takes the values of this dtype where it needs the bytes",
            "Store the same bytes as U8.",
        )
        for weight in typed
    ]
    return found + _contradictions(disk, weights) + _missing_input_scales(disk, weights)


def _contradictions(disk: OnDisk, weights: Sequence[Weight]) -> list[Hazard]:
    """Return a hazard per setting that names another format, dtype of scales or kind of codes than the weights have."""
    rows = [CONFIG_SCHEMES[name] for name in {weight.format.name for weight in weights}]
    if not rows:
        return []
    formats = {row.format for row in rows} | {MIXED, "naive-quantized"}
    scales = {row.scale_dtype for row in rows}
    settings = [disk.settings, *_groups(disk)]
    stated = [("format", one.get("format"), formats) for one in settings]
    for group in (one.get("weights") for one in settings):
        if isinstance(group, Mapping):
            dtype = _DTYPES.get(str(group.get("scale_dtype")))
            stated += [("scale_dtype", dtype, scales)] if len(rows) == 1 and rows[0].scale_dtype != "F32" else []
            stated.append(("symmetric", None if group.get("symmetric") is not False else "false", {"true"}))
    return [
        Hazard(
            "config.json",
            f"{key} is {printable(value)}",
            f"{', '.join(sorted(known - {MIXED, 'naive-quantized'}))}, as the weights are stored",
            "Restore the config.json written with these weights.",
        )
        for key, value, known in stated
        if isinstance(value, str) and value not in known
    ]


_DTYPES = {"torch.float8_e4m3fn": "F8_E4M3", "torch.uint8": "U8", "torch.float32": "F32", "torch.bfloat16": "BF16"}


def _dtype_of(name: str, disk: OnDisk) -> str | None:
    info = disk.tensors.get(name)
    return None if info is None else info.dtype


def _missing_input_scales(disk: OnDisk, weights: Sequence[Weight]) -> list[Hazard]:
    """Return a hazard per weight whose activation scale the configuration states and no tensor holds."""
    promised: list[tuple[Sequence[str], str]] = []
    for group in _groups(disk):
        inputs = group.get("input_activations")
        dynamic = inputs.get("dynamic") if isinstance(inputs, Mapping) else True
        ending = "" if dynamic is True else ".input_global_scale" if dynamic else ".input_scale"
        promised.append((listed(group.get("targets")), ending))
    targets = read_targets(promised)
    stated = ((module, targets.of(module)) for module in map(module_of, weights))
    names = [module + ending for module, ending in stated if ending]
    return [
        Hazard(
            printable(name),
            "missing",
            "a scale, since its config group states scales of activations that are stored",
            "Calibrate the activations, or set input_activations to null.",
        )
        for name in names
        if name not in disk.tensors
    ]


COMPRESSED_TENSORS = Layout(
    name="compressed-tensors",
    meaning="codes, scales and a quantization_config, as llm-compressor writes them",
    source="compressed-tensors 0.20, llm-compressor 0.14",
    formats=tuple(CONFIG_SCHEMES),
    refusal=_refusal,
    contents=_contents,
    settings=_settings,
    weights=_weights,
    aliases=("ct",),
    dialects=("compressed-tensors",),
    needs_config=True,
    remarks=_remarks,
    ignored=_ignored,
    hazards=_hazards,
    transforms=transforms_of,
    known_settings=COMPRESSED_TENSORS_SETTINGS,
    model_scales=True,
    input_scales=tuple(row.block_format for row in CONFIG_SCHEMES.values() if row.calibrated is not None),
)
