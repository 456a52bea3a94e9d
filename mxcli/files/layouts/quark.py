"""AMD Quark's export, as vLLM and, with amd-quark installed, transformers read it.

MX layers state no activations: only their weights are quantized. vLLM has FP8 layers only with quantized activations,
so these are stated as dynamic, per token, which needs no calibration. FP8 scales are BF16 if the rule rounds them to
it, as Quark exports them for BF16 models, else F32, which vLLM keeps and Quark rounds to the model's dtype. The
configuration states Quark's own way of choosing scales; no reader chooses them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mxcli.errors import printable, together
from mxcli.files.layouts.known_settings import QUARK_SETTINGS
from mxcli.files.layouts.layout import (
    WEIGHT,
    Config,
    Content,
    Entry,
    Layout,
    OnDisk,
    Transforms,
    Unread,
    Weight,
    check_fit,
    matrix_refusal,
    module_of,
    weights_of,
)
from mxcli.files.layouts.loaders import Ignored, by_glob_or_regex, listed
from mxcli.files.layouts.parts import CODES, SCALES
from mxcli.numerics.blocks import grid_shape, packed_columns
from mxcli.numerics.formats import FORMATS, BlockFormat
from mxcli.numerics.mantissa_rules import MantissaScaleRule
from mxcli.numerics.scheme import Rules, resolve

VERSION = "0.13"
SCALE = "_scale"
CODE_DTYPES = ("U8", "F8_E4M3")
ONLINE = ("online_r1_rotation", "r3", "r4")
"""Settings of rotations that loaders apply to activations."""
GLOBAL, BY_LAYER, BY_TYPE = "global_quant_config", "layer_quant_config", "layer_type_quant_config"
LINEAR = "Linear"
F16_SCALES, COLUMN_OF_SCALES = "F16", "column"
"""Variants that are read only: scales of F16 models, and one scale per row as a matrix of one column."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Quark's configuration for one of our formats: `weight` and `inputs` are its QTensorConfigs."""

    block_format: str
    weight: Mapping[str, object]
    inputs: Mapping[str, object] | None = None

    @property
    def config(self) -> dict[str, object]:
        """Return the LayerQuantConfig as JSON."""
        inputs = None if self.inputs is None else dict(self.inputs)
        weight = dict(self.weight)
        return {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None, "target_device": None}

    def means(self, args: Mapping[str, object]) -> bool:
        """Return whether a QTensorConfig of weights states this one."""
        keys = ("dtype", "qscheme", "group_size", "scale_format")
        rows = self.weight["qscheme"] != "per_channel" or args.get("ch_axis") == self.weight["ch_axis"]
        return not args.get("is_dynamic") and rows and all(self.weight[key] == args.get(key) for key in keys)


_DEFAULTS = {
    "block_size": None,
    "enable_buffer_reuse": False,
    "is_dynamic": False,
    "is_scale_quant": False,
    "max_input_numel": 4194304,
    "mx_element_dtype": None,
    "round_method": "half_even",
    "scale_type": "float",
    "zero_point_type": "int32",
}


def _mx(block_format: str, dtype: str) -> LayerConfig:
    blocks = {"qscheme": "per_group", "group_size": 32, "ch_axis": -1, "observer_cls": "PerBlockMXObserver"}
    scales = {"scale_format": "e8m0", "scale_calculation_mode": "even", "symmetric": None}
    return LayerConfig(block_format, {**_DEFAULTS, "dtype": dtype, **blocks, **scales})


def _fp8(block_format: str, *, per_row: bool = False) -> LayerConfig:
    scales = {"group_size": None, "scale_format": None, "scale_calculation_mode": None, "symmetric": True}
    common = {**_DEFAULTS, "dtype": "fp8_e4m3", **scales}
    token = {"qscheme": "per_channel", "ch_axis": 1, "observer_cls": "PerChannelMinMaxObserver", "is_dynamic": True}
    tensor = {"qscheme": "per_tensor", "ch_axis": None, "observer_cls": "PerTensorMinMaxObserver"}
    row = {"qscheme": "per_channel", "ch_axis": 0, "observer_cls": "PerChannelMinMaxObserver"}
    return LayerConfig(block_format, {**common, **(row if per_row else tensor)}, {**common, **token})


LAYER_CONFIGS: dict[str, LayerConfig] = {
    row.block_format: row
    for row in (
        _mx("mxfp4_e2m1", "fp4"),
        _mx("mxfp6_e2m3", "fp6_e2m3"),
        _mx("mxfp6_e3m2", "fp6_e3m2"),
        _fp8("fp8_e4m3"),
        _fp8("fp8_e4m3_channel", per_row=True),
    )
}


def _refusal(weight: Weight) -> str | None:
    if weight.format.name not in LAYER_CONFIGS:
        return f"it has no {weight.format.name}"
    return matrix_refusal(weight)


def _contents(weight: Weight) -> tuple[Content, ...]:
    fmt, (rows, columns) = weight.format, weight.shape
    codes = Entry(weight.name, _codes_dtype(fmt), (rows, packed_columns(fmt, columns)))
    grid = () if fmt.block == (None, None) else grid_shape(fmt, weight.shape)
    # Quark stores one scale per row as a vector.
    shape = (rows,) if fmt.block == (1, None) and COLUMN_OF_SCALES not in weight.variant else grid
    return Content(codes, CODES), Content(Entry(weight.name + SCALE, _scale_dtype(weight), shape), SCALES)


def _codes_dtype(fmt: BlockFormat) -> str:
    return "U8" if fmt.element.stored_bits < 8 else "F8_E4M3"


def _scale_dtype(weight: Weight) -> str:
    if weight.format.has_power_of_two_scales:
        return "U8"
    if F16_SCALES in weight.variant:
        return "F16"
    rule = weight.scheme.scale_rule
    return "BF16" if isinstance(rule, MantissaScaleRule) and rule.bf16_scale else "F32"


def _settings(weights: Sequence[Weight], ignored: Sequence[str]) -> dict[str, object]:
    """Return the configuration: the format of most weights for all layers, and the others by module name."""
    usual = Counter(weight.format.name for weight in weights).most_common(1)[0][0]
    others = {
        module_of(weight): LAYER_CONFIGS[weight.format.name].config for weight in weights if weight.format.name != usual
    }
    return {
        "quant_method": "quark",
        "version": VERSION,
        "quant_mode": "eager_mode",
        "algo_config": None,
        "exclude": sorted(ignored),
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        GLOBAL: LAYER_CONFIGS[usual].config,
        BY_LAYER: dict(sorted(others.items())),
        BY_TYPE: {},
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "softmax_quant_spec": None,
    }


def _weights(disk: OnDisk) -> list[Weight]:
    layers = _layer_configs(disk.settings)
    names: dict[str, None] = {}
    for name, info in disk.tensors.items():
        if name.endswith(WEIGHT) and info.dtype in CODE_DTYPES:
            names[name] = None
        elif name.endswith(WEIGHT + SCALE):
            names[name.removesuffix(SCALE)] = None
    return weights_of(names, lambda name: _weight(name, layers, disk))


def _weight(name: str, layers: Sequence[tuple[str, LayerConfig | None]], disk: OnDisk) -> Weight:
    """Return the weight called `name`. Raises ValueError if its tensors are not what its configuration states."""
    codes, scales = disk.tensors.get(name), disk.tensors.get(name + SCALE)
    if codes is None:
        raise ValueError(f"has the scale {printable(name + SCALE)}, but is missing itself")
    if scales is None:
        raise ValueError(f"is {codes.dtype}, but its scale {printable(name + SCALE)} is missing")
    layer = next((layer for pattern, layer in layers if fnmatchcase(name.removesuffix(WEIGHT), pattern)), None)
    if layer is None:
        raise ValueError("has a scale, but the configuration does not cover its module")
    fmt = FORMATS[layer.block_format]
    if len(codes.shape) != 2:
        raise ValueError(f"{list(codes.shape)} is not the shape of a matrix of codes ({layer.weight['dtype']})")
    # The rule of FP8 scales follows from their dtype.
    rule = "amax-bf16-scale" if not fmt.has_power_of_two_scales and scales.dtype == "BF16" else None
    shape = (codes.shape[0], codes.shape[1] * 8 // fmt.element.stored_bits)
    variants = [F16_SCALES] if scales.dtype == "F16" and fmt.scale.bits == 32 else []
    variants += [COLUMN_OF_SCALES] if len(scales.shape) == 2 else []
    weight = Weight(name, shape, resolve(fmt, Rules(scale_rounding=rule)), disk.dtype, variant=" ".join(variants))
    fault = _refusal(weight)
    if fault:
        raise ValueError(f"{list(codes.shape)} is not a shape of {layer.weight['dtype']} codes: {fault}")
    check_fit(_contents(weight), disk.tensors, str(layer.weight["dtype"]))
    return weight


def _layer_configs(settings: Config) -> list[tuple[str, LayerConfig | None]]:
    """Return module patterns and their configurations, highest priority first; None: not quantized.

    Raises Unread for weights that are not in LAYER_CONFIGS.
    """
    by_layer, types = settings.get(BY_LAYER), settings.get(BY_TYPE)
    stated = list(by_layer.items()) if isinstance(by_layer, Mapping) else []
    stated += [("*", types[LINEAR])] if isinstance(types, Mapping) and LINEAR in types else []
    stated += [("*", settings.get(GLOBAL))]
    found: list[tuple[str, LayerConfig | None]] = []
    problems = []
    for pattern, config in stated:
        args = config.get("weight") if isinstance(config, Mapping) else None
        layer = next((row for row in LAYER_CONFIGS.values() if isinstance(args, Mapping) and row.means(args)), None)
        found.append((str(pattern), layer))
        if args is not None and layer is None:
            known = ", ".join(dict.fromkeys(str(row.weight["dtype"]) for row in LAYER_CONFIGS.values()))
            problems.append(
                f"config.json: mxcli cannot read the weights of '{printable(pattern)}' as its quantization_config "
                f"states them; it reads {known}, each quantized once."
            )
    if problems:
        raise together(Unread, "config.json", problems)
    return found


def _ignored(disk: OnDisk) -> Ignored:
    entries = listed(disk.settings.get("exclude"))
    reading = "a module by its path or a glob, or by a regular expression after re: that matches its beginning"
    return Ignored("exclude", entries, by_glob_or_regex, reading, experts_for="vLLM")


def _transforms(disk: OnDisk) -> Transforms:
    """Return the rotations that loaders apply to activations; others are in the weights."""
    stated = disk.settings.get("algo_config")
    algorithms = [each for each in (stated if isinstance(stated, list) else [stated]) if isinstance(each, Mapping)]
    online = [key for each in algorithms for key in ONLINE if each.get(key)]
    if not online:
        return Transforms()
    return Transforms(
        f"its algo_config states rotations of activations ({', '.join(online)}), which loaders undo at run time: its "
        "weights alone are other ones"
    )


def _remarks(weights: Sequence[Weight]) -> list[str]:
    formats = {weight.format.name for weight in weights}
    notes = []
    if "fp8_e4m3" in formats:
        notes.append("Loaders quantize the activations of Quark's FP8 layers, dynamically per token.")
    if any(weight.dtype != "F32" and _scale_dtype(weight) == "F32" for weight in weights):
        notes.append("FP8 scales are binary32: vLLM keeps them so, Quark rounds them to the dtype of the model.")
    others = sorted({weight.scheme.scale_rule.name for weight in weights if weight.format.scale.bits == 8} - {"even"})
    if others:
        notes.append(
            f"The configuration names Quark's own rule for scales, even; these were rounded by {', '.join(others)}, "
            "which loaders do not need to know. --scale-rounding even makes both the same."
        )
    return notes


QUARK = Layout(
    name="quark",
    meaning="AMD Quark's export: MXFP4, MXFP6 and FP8",
    source="AMD Quark 0.13 (its exports decoded); vLLM 0.33 (read)",
    formats=tuple(LAYER_CONFIGS),
    refusal=_refusal,
    contents=_contents,
    settings=_settings,
    weights=_weights,
    dialects=("quark",),
    needs_config=True,
    remarks=_remarks,
    ignored=_ignored,
    transforms=_transforms,
    known_settings=QUARK_SETTINGS,
    model_scales=True,
)
