"""NVIDIA ModelOpt's unified checkpoint, as vLLM, SGLang and TensorRT-LLM read it.

NVFP4 scales back by `codes * (block scale * weight_scale_2)`, both decode scales. Without scales of activations an
NVFP4 layer is W4A16: loaders would use uninitialized memory for a missing `input_scale`. FP8 of whole tensors has no
such form, so it needs those scales.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mxcli.errors import printable
from mxcli.files.layouts.known_settings import MODELOPT_SETTINGS
from mxcli.files.layouts.layout import (
    WEIGHT,
    Content,
    Entry,
    Layout,
    OnDisk,
    Transforms,
    UnreadFormat,
    Weight,
    check_fit,
    found_weights,
    matrix_refusal,
    module_of,
)
from mxcli.files.layouts.loaders import Hazard, Ignored, by_glob_or_part, listed
from mxcli.files.layouts.parts import CODES, DECODE, SCALES, constant
from mxcli.files.model_files import PRODUCER_CONFIG
from mxcli.numerics.blocks import grid_shape, packed_columns
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.scheme import Rules, resolve

PRODUCER = {"name": "modelopt", "version": "0.47.0"}
MIXED = "MIXED_PRECISION"
PRE_SCALE = ".pre_quant_scale"
EXCLUDED = "exclude_modules"
SQUEEZED = "squeezed"
"""A variant that is read only: the scale of a weight of a single block, without dimensions."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm of ModelOpt: our format, its `quant_algo`, the dtype of its scales, and the stated group size.

    `group` is its config_groups entry for weights, and for inputs with a stored scale; None if it has no groups.
    `calibrated` is the `quant_algo` with such scales.
    """

    block_format: str
    name: str
    scales: str
    group_size: int | None = None
    group: Mapping[str, object] | None = None
    calibrated: str = ""

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight of that shape."""
        fmt = FORMATS[self.block_format]
        if fmt.scale.bits == 8:
            return grid_shape(fmt, shape)
        down, across = grid_shape(fmt, shape)
        if fmt.block == (None, None):
            return ()
        return (down,) if fmt.block == (1, None) else (down, 1, across, 1)


_NVFP4_GROUP = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
ALGORITHMS: dict[str, Algorithm] = {
    row.block_format: row
    for row in (
        Algorithm("nvfp4", "W4A16_NVFP4", "F8_E4M3", 16, _NVFP4_GROUP, calibrated="NVFP4"),
        Algorithm("mxfp8_e4m3", "MXFP8", "U8", 32),
        Algorithm("mxfp4_e2m1", "mxfp4", "U8", 32),
        Algorithm("fp8_e4m3_channel", "FP8_PER_CHANNEL_PER_TOKEN", "F32"),
        Algorithm("fp8_e4m3_128x128", "fp8_pb_wo", "F32"),
        Algorithm(
            "fp8_e4m3",
            "FP8",
            "F32",
            group={"dynamic": False, "num_bits": 8, "type": "float"},
            calibrated="FP8",
        ),
    )
}


_OUR_ALGORITHMS = frozenset(
    {MIXED, "W4A8_MXFP4_FP8", *(name.upper() for row in ALGORITHMS.values() for name in (row.name, row.calibrated))}
)
"""Algorithms, in capitals, whose weights are in our formats."""


def _refusal(weight: Weight) -> str | None:
    if weight.format.name not in ALGORITHMS:
        return f"it has no {weight.format.name}"
    return matrix_refusal(weight)


def _contents(weight: Weight) -> tuple[Content, ...]:
    fmt, (rows, columns) = weight.format, weight.shape
    algorithm = ALGORITHMS[fmt.name]
    codes_dtype = "U8" if fmt.element.stored_bits < 8 else "F8_E4M3"
    codes = Entry(weight.name, codes_dtype, (rows, packed_columns(fmt, columns)))
    grid = () if weight.variant == SQUEEZED else algorithm.scale_shape(weight.shape)
    scales = Entry(weight.name + "_scale", algorithm.scales, grid)
    found = [Content(codes, CODES), Content(scales, SCALES)]
    if fmt.tensor_scale is not None:
        found.append(Content(Entry(weight.name + "_scale_2", "F32", ()), DECODE))
    if weight.input_scale is not None:
        name = f"{module_of(weight)}.input_scale"
        found.append(Content(Entry(name, "F32", ()), constant(weight.input_scale.decode)))
    return tuple(found)


def _modules(weights: Sequence[Weight]) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = {}
    for weight in weights:
        modules.setdefault(weight.format.name, []).append(module_of(weight))
    return modules


def _calibrated(weights: Sequence[Weight]) -> set[str]:
    """Return the formats whose layers store a scale of their inputs."""
    return {weight.format.name for weight in weights if weight.input_scale is not None}


def _settings(weights: Sequence[Weight], ignored: Sequence[str]) -> dict[str, object]:
    modules = _modules(weights)
    settings: dict[str, object] = {"quant_method": "modelopt", "producer": PRODUCER, "ignore": sorted(ignored)}
    calibrated = _calibrated(weights)
    if len(modules) > 1:
        return settings | {"quant_algo": MIXED, "quantized_layers": _layers(modules, calibrated)}
    algorithm = ALGORITHMS[next(iter(modules))]
    settings["quant_algo"] = algorithm.calibrated if calibrated else algorithm.name
    if algorithm.group is not None:
        inputs = dict(algorithm.group) if calibrated else None
        group = {"weights": dict(algorithm.group), "input_activations": inputs, "targets": ["Linear"]}
        settings["config_groups"] = {"group_0": group}
    return settings


def _extra_configs(weights: Sequence[Weight], ignored: Sequence[str]) -> dict[str, dict[str, object]]:
    modules = _modules(weights)
    quantization: dict[str, object] = {"kv_cache_quant_algo": None, "exclude_modules": sorted(ignored)}
    calibrated = _calibrated(weights)
    if len(modules) > 1:
        quantization |= {"quant_algo": MIXED, "quantized_layers": _layers(modules, calibrated)}
    else:
        quantization |= _stated(ALGORITHMS[next(iter(modules))], calibrated)
    return {PRODUCER_CONFIG: {"producer": PRODUCER, "quantization": quantization}}


def _stated(algorithm: Algorithm, calibrated: Collection[str]) -> dict[str, object]:
    name = algorithm.calibrated if algorithm.block_format in calibrated else algorithm.name
    stated: dict[str, object] = {"quant_algo": name}
    return stated if algorithm.group_size is None else stated | {"group_size": algorithm.group_size}


def _layers(modules: Mapping[str, Sequence[str]], calibrated: Collection[str]) -> dict[str, object]:
    return {
        name: _stated(ALGORITHMS[format], calibrated) for format in sorted(modules) for name in sorted(modules[format])
    }


def _weights(disk: OnDisk) -> list[Weight]:
    return found_weights(disk, WEIGHT + "_scale", lambda module: _weight(module, disk))


def _weight(module: str, disk: OnDisk) -> Weight:
    """Return the weight of a module, its format by the dtypes and shapes of its tensors. Raises ValueError for a
    misfit."""
    name = module + WEIGHT
    codes, scales = disk.tensors.get(name), disk.tensors[name + "_scale"]
    if codes is None:
        raise ValueError(f"has a weight_scale, but {name} is missing (modelopt)")
    if len(codes.shape) != 2:
        raise ValueError(f"{list(codes.shape)} is not the shape of a matrix of codes (modelopt)")
    rows, packed = codes.shape
    stated = _algorithm_of(module, disk)
    for algorithm in ALGORITHMS.values():
        fmt = FORMATS[algorithm.block_format]
        shape = (rows, packed * 8 // fmt.element.stored_bits)
        single = stated == algorithm.name.upper() and scales.shape == () and math.prod(grid_shape(fmt, shape)) == 1
        variant = SQUEEZED if single and algorithm.scale_shape(shape) else ""
        weight = Weight(name, shape, resolve(fmt, Rules(dialect="modelopt")), disk.dtype, variant=variant)
        expected = {content.entry.name: content.entry for content in _contents(weight)}
        fits = codes.dtype == expected[name].dtype and scales.dtype == algorithm.scales
        if fits and (name + "_scale_2" in expected) == (name + "_scale_2" in disk.tensors):
            if scales.shape != expected[scales.name].shape:
                continue
            fault = _refusal(weight)
            if fault:
                raise ValueError(f"{list(codes.shape)} is not a shape of {algorithm.name}: {fault}")
            check_fit(_contents(weight), disk.tensors, algorithm.name)
            return weight
    if stated and stated not in _OUR_ALGORITHMS:
        raise UnreadFormat(f"its quant_algo is {stated}, which mxcli does not read")
    known = ", ".join(algorithm.name for algorithm in ALGORITHMS.values())
    raise ValueError(
        f"weight {codes.dtype} {list(codes.shape)} with weight_scale {scales.dtype} {list(scales.shape)} fits none of "
        f"{known}"
    )


def _algorithm_of(module: str, disk: OnDisk) -> str:
    """Return the algorithm that the configuration states for a module, in capitals; "" if it states none."""
    stated, _ = _stated_by(disk)
    layers = stated.get("quantized_layers")
    own = layers.get(module) if isinstance(layers, Mapping) else stated
    return str(own.get("quant_algo", "")).upper() if isinstance(own, Mapping) else ""


def _transforms(disk: OnDisk) -> Transforms:
    """Return the scaling of activations by channel (AWQ, SmoothQuant), whose inverse the weights contain."""
    found = [name for name in disk.tensors if name.endswith(PRE_SCALE)]
    if not found:
        return Transforms()
    return Transforms(
        f"{printable(found[0])} scales the inputs of its layer, and the weight contains the inverse: the weight alone "
        "is another one",
        tensors=frozenset(found),
    )


def _ignored(disk: OnDisk) -> Ignored:
    """Return the list of hf_quant_config.json if there is one: vLLM looks there first."""
    stated, key = _stated_by(disk)
    layers = stated.get("quantized_layers")
    return Ignored(
        key,
        listed(stated.get(key)),
        by_glob_or_part,
        "a module by its path, by a glob over all of it, or by a part of it",
        targeted=lambda module: not isinstance(layers, Mapping) or module in layers,
    )


def _stated_by(disk: OnDisk) -> tuple[Mapping[str, object], str]:
    """Return the configuration that counts, and the key of its list of modules that stay plain."""
    quantization = disk.producer_config.get("quantization")
    if isinstance(quantization, Mapping):
        return quantization, EXCLUDED
    return disk.settings, "ignore"


def _hazards(disk: OnDisk, weights: Sequence[Weight]) -> list[Hazard]:
    found = []
    stated, key = _stated_by(disk)
    if key == EXCLUDED:
        needed = {"NVFP4": ("group_size", "kv_cache_quant_algo", key), "MXFP8": ("kv_cache_quant_algo", key)}
        missing = [each for each in needed.get(str(stated.get("quant_algo")).upper(), ()) if each not in stated]
        if missing:
            found.append(
                Hazard(PRODUCER_CONFIG, "incomplete", f"{', '.join(missing)}: vLLM refuses it without", "Add them.")
            )
        both = (set(listed(stated.get(key))), set(listed(disk.settings.get("ignore"))))
        if disk.settings and both[0] != both[1]:
            differing = sorted(both[0] ^ both[1])
            found.append(
                Hazard(
                    f"config.json and {PRODUCER_CONFIG}",
                    f"ignore and {key} differ in {len(differing):,} entries ('{printable(differing[0])}')",
                    "the same modules: loaders read the one or the other",
                    "Make them equal.",
                    certain=False,
                )
            )
    return found + _disagreements(disk) + _missing_input_scales(disk, weights)


def _disagreements(disk: OnDisk) -> list[Hazard]:
    """Return a hazard if both documents do not state the same algorithms: loaders read the one or the other. Versions
    of ModelOpt before 0.35 write one document only."""
    quantization = disk.producer_config.get("quantization")
    if not isinstance(quantization, Mapping):
        return []
    ours, theirs = _stated_algorithms(disk.settings), _stated_algorithms(quantization)
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if not differing or (not disk.settings and _version(disk) < _BOTH_DOCUMENTS):
        return []
    first = differing[0]
    stated = f"{printable(ours.get(first))} and {printable(theirs.get(first))}" if disk.settings else "none and some"
    return [
        Hazard(
            f"config.json and {PRODUCER_CONFIG}",
            f"{printable(first)} is {stated}",
            "the same quantization in both: loaders read the one or the other",
            "Restore the documents written with these weights.",
        )
    ]


_BOTH_DOCUMENTS = (0, 35)


def _stated_algorithms(stated: Mapping[str, object]) -> dict[str, str]:
    """Return the algorithms that a document states, in capitals: that of all layers as quant_algo, and of single
    ones."""
    layers = stated.get("quantized_layers")
    found: Mapping[str, object] = {"quant_algo": stated, **(layers if isinstance(layers, Mapping) else {})}
    return {
        name: str(each["quant_algo"]).upper()
        for name, each in found.items()
        if isinstance(each, Mapping) and each.get("quant_algo") is not None
    }


def _version(disk: OnDisk) -> tuple[int, ...]:
    """Return the version of ModelOpt that wrote the files; () if they do not state it."""
    producer = disk.producer_config.get("producer")
    text = str(producer.get("version")) if isinstance(producer, Mapping) else ""
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _missing_input_scales(disk: OnDisk, weights: Sequence[Weight]) -> list[Hazard]:
    """Return a hazard per weight whose activation scale loaders expect and no tensor holds."""
    groups = disk.settings.get("config_groups")
    each = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    weight_only = bool(each) and all(group.get("input_activations") is None for group in each)
    algorithm = str(_stated_by(disk)[0].get("quant_algo")).upper()
    if weight_only or algorithm not in ("NVFP4", "FP8"):
        return []
    names = [f"{module_of(weight)}.input_scale" for weight in weights]
    missing = [name for name in names if name not in disk.tensors]
    return [
        Hazard(
            printable(name),
            "missing",
            f"a scale: {algorithm} has quantized activations, and vLLM takes 1 or uninitialized memory without it",
            "Calibrate the activations, or state W4A16_NVFP4 for weights alone.",
            certain=len(missing) < len(names),
        )
        for name in missing
    ]


MODELOPT = Layout(
    name="modelopt",
    meaning="NVIDIA ModelOpt's unified checkpoint, with both configuration files",
    source="NVIDIA ModelOpt 0.47; vLLM 0.33 (read)",
    formats=tuple(ALGORITHMS),
    refusal=_refusal,
    contents=_contents,
    settings=_settings,
    weights=_weights,
    dialects=("modelopt",),
    extra_configs=_extra_configs,
    ignored=_ignored,
    hazards=_hazards,
    transforms=_transforms,
    known_settings=MODELOPT_SETTINGS,
    input_scales=tuple(row.block_format for row in ALGORITHMS.values() if row.calibrated),
    needs_input_scales=tuple(row.block_format for row in ALGORITHMS.values() if row.calibrated == row.name),
)
