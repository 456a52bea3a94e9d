"""NVIDIA ModelOpt's unified checkpoint, as vLLM, SGLang and TensorRT-LLM read it.

NVFP4 scales back by `codes * (block scale * weight_scale_2)`, both decode scales. Without scales of activations an
NVFP4 layer is W4A16: loaders would use uninitialized memory for a missing `input_scale`. FP8 of whole tensors has no
such form, so it needs those scales.

NVFP4_AWQ and NVFP4_SVD are read: `pre_quant_scale` is a factor of each input, of which the weight contains the
inverse, and NVFP4_SVD adds the product of two thin matrices. Where ModelOpt folded that factor into the norm before,
the file has no such tensor, and norm and weight are right together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mxcli.errors import printable
from mxcli.files.layouts.adjusted import DOWN, INPUTS, UP, Ending, contents_of, fault
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
    matrix_refusal,
    module_of,
    weights_of,
)
from mxcli.files.layouts.loaders import Ignored, by_glob_or_part, listed
from mxcli.files.layouts.modelopt_hazards import ADJUSTED, hazards, stated_by
from mxcli.files.layouts.parts import CODES, DECODE, SCALES, Part, constant
from mxcli.files.model_files import PRODUCER_CONFIG
from mxcli.numerics.blocks import grid_shape, packed_columns
from mxcli.numerics.formats import find_format
from mxcli.numerics.scheme import Rules, resolve

PRODUCER = {"name": "modelopt", "version": "0.47.0"}
MIXED = "MIXED_PRECISION"
PRE_SCALE = ".pre_quant_scale"
ENDINGS = (Ending(PRE_SCALE, INPUTS), Ending(".svdquant_lora_a", DOWN), Ending(".svdquant_lora_b", UP))
"""Tensors next to codes that change the decoded weight."""
OF_STACK = "_weight_scale"
"""The ending of the scales of a stack of experts, after its name."""
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
        fmt = find_format(self.block_format)
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


READ_ONLY: dict[str, Algorithm] = {
    row.block_format: row
    for row in (
        Algorithm(f"e2m1:e4m3:1x{size}:fp32", "W4A16_NVFP4", "F8_E4M3", size, calibrated="NVFP4")
        for size in (32, 64, 128)
    )
}
"""NVFP4 with other group sizes, which ModelOpt exports and engines have no kernels for."""
_READ = {**ALGORITHMS, **READ_ONLY}
_OUR_ALGORITHMS = frozenset(
    {
        MIXED,
        "W4A8_MXFP4_FP8",
        *ADJUSTED,
        *(name.upper() for row in ALGORITHMS.values() for name in (row.name, row.calibrated)),
    }
)
"""Algorithms, in capitals, whose weights are in our formats."""


def _refusal(weight: Weight) -> str | None:
    if weight.format.name not in ALGORITHMS:
        return f"it has no {weight.format.name}"
    return matrix_refusal(weight)


def _contents(weight: Weight) -> tuple[Content, ...]:
    fmt, (rows, columns) = weight.format, weight.shape
    algorithm = _READ[fmt.name]
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
    return (*found, *contents_of(module_of(weight), weight.adjusting, ENDINGS))


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
    ending = WEIGHT + "_scale"
    modules = [name.removesuffix(ending) for name in disk.tensors if name.endswith(ending) and len(name) > len(ending)]
    stacks = [name.removesuffix(OF_STACK) for name in disk.tensors if name.removesuffix(OF_STACK) in disk.tensors]
    stacks = [name for name in stacks if name + OF_STACK in disk.tensors and len(disk.tensors[name].shape) == 3]
    return weights_of(
        (*modules, *stacks), lambda name: _stack(name, disk) if name in disk.tensors else _weight(name, disk)
    )


def _stack(name: str, disk: OnDisk) -> Weight | None:
    """Raise UnreadFormat for a stack of experts in one tensor, such as gpt-oss has."""
    stated = _algorithm_of(name.rpartition(".")[0], disk) or _algorithm_of("", disk) or "no quant_algo"
    raise UnreadFormat(
        f"it is a stack of {disk.tensors[name].shape[0]:,} experts in one tensor, {stated}, whose order of codes and "
        "scales ([expert, in, out]) mxcli does not read; use the checkpoint that it was made from"
    )


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
    adjusting = _adjusting(module, disk)
    for algorithm in (_READ if not stated or stated in _OUR_ALGORITHMS else ALGORITHMS).values():
        fmt = find_format(algorithm.block_format)
        shape = (rows, packed * 8 // fmt.element.stored_bits)
        single = stated == algorithm.name.upper() and scales.shape == () and math.prod(grid_shape(fmt, shape)) == 1
        variant = SQUEEZED if single and algorithm.scale_shape(shape) else ""
        scheme = resolve(fmt, Rules(dialect="modelopt"))
        weight = Weight(name, shape, scheme, disk.dtype, variant=variant, adjusting=tuple(adjusting.values()))
        expected = {content.entry.name: content.entry for content in _contents(weight)}
        fits = codes.dtype == expected[name].dtype and scales.dtype == algorithm.scales
        if fits and (name + "_scale_2" in expected) == (name + "_scale_2" in disk.tensors):
            if scales.shape != expected[scales.name].shape:
                continue
            misfit = matrix_refusal(weight)
            if misfit:
                raise ValueError(f"{list(codes.shape)} is not a shape of {algorithm.name}: {misfit}")
            misfit = fault(shape, adjusting)
            if misfit:
                raise ValueError(misfit)
            check_fit(_contents(weight), disk.tensors, algorithm.name)
            return weight
    if stated and stated not in _OUR_ALGORITHMS:
        raise UnreadFormat(f"its quant_algo is {stated}, which mxcli does not read")
    known = ", ".join(algorithm.name for algorithm in ALGORITHMS.values())
    raise ValueError(
        f"weight {codes.dtype} {list(codes.shape)} with weight_scale {scales.dtype} {list(scales.shape)} fits none of "
        f"{known}"
    )


def _adjusting(module: str, disk: OnDisk) -> dict[Part, Entry]:
    """Return the tensors that change the decoded weight of a module, by what they hold."""
    stored = ((ending.part, disk.tensors.get(module + ending.name)) for ending in ENDINGS)
    return {part: Entry(info.name, info.dtype, info.shape) for part, info in stored if info is not None}


def _algorithm_of(module: str, disk: OnDisk) -> str:
    """Return the algorithm that the configuration states for a module, in capitals; "" if it states none."""
    stated, _ = stated_by(disk)
    layers = stated.get("quantized_layers")
    own = layers.get(module) if isinstance(layers, Mapping) else stated
    return str(own.get("quant_algo", "")).upper() if isinstance(own, Mapping) else ""


def _transforms(disk: OnDisk) -> Transforms:
    """Return the scaling of inputs by channel (AWQ, SmoothQuant), whose inverse the weights contain. A weight that is
    read has it in its values; a plain one next to it is another one alone."""
    found = [name for name in disk.tensors if name.endswith(PRE_SCALE)]
    alone = [name for name in found if name.removesuffix(PRE_SCALE) + WEIGHT + "_scale" not in disk.tensors]
    if alone:
        refusal = (
            f"{printable(alone[0])} scales the inputs of its layer, and the weight contains the inverse: the weight "
            "alone is another one"
        )
        return Transforms(refusal, tensors=frozenset(found))
    if not found:
        return Transforms()
    note = (
        f"The inputs of {len(found):,} layers are multiplied by {PRE_SCALE[1:]} ('{printable(found[0])}', …); the "
        "values of their weights contain it."
    )
    return Transforms(note=note, tensors=frozenset(found))


def _ignored(disk: OnDisk) -> Ignored:
    """Return the list of hf_quant_config.json if there is one: vLLM looks there first."""
    stated, key = stated_by(disk)
    layers = stated.get("quantized_layers")
    return Ignored(
        key,
        listed(stated.get(key)),
        by_glob_or_part,
        "a module by its path, by a glob over all of it, or by a part of it",
        targeted=lambda module: not isinstance(layers, Mapping) or module in layers,
    )


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
    hazards=hazards,
    transforms=_transforms,
    known_settings=MODELOPT_SETTINGS,
    input_scales=tuple(row.block_format for row in ALGORITHMS.values() if row.calibrated),
    needs_input_scales=tuple(row.block_format for row in ALGORITHMS.values() if row.calibrated == row.name),
)
