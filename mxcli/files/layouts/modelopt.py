"""NVIDIA ModelOpt's unified checkpoint, as vLLM, SGLang and TensorRT-LLM read it.

NVFP4 scales back by `codes * (block scale * weight_scale_2)`, both decode scales. Without scales of activations an
NVFP4 layer is W4A16: loaders would take memory that nothing filled for a missing `input_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mxcli.files.layouts.layout import (
    WEIGHT,
    Content,
    Entry,
    Layout,
    OnDisk,
    Weight,
    check_fit,
    found_weights,
    matrix_refusal,
    module_of,
)
from mxcli.files.layouts.parts import CODES, DECODE, SCALES
from mxcli.files.model_files import PRODUCER_CONFIG
from mxcli.numerics.blocks import grid_shape, packed_columns
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.recipe import resolve

PRODUCER = {"name": "modelopt", "version": "0.47.0"}
MIXED = "MIXED_PRECISION"


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One of ModelOpt's algorithms: our format, its `quant_algo`, the group size that its configuration states, the
    dtype of its scales, and a sentence where not every loader takes it.

    `group` is what config_groups says of the weights; None where it has no groups.
    """

    ours: str
    name: str
    scales: str
    group_size: int | None = None
    group: Mapping[str, object] | None = None
    caution: str = ""

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a weight of that shape."""
        row = FORMATS[self.ours]
        if row.scale.bits == 8:
            return grid_shape(row, shape)
        down, across = grid_shape(row, shape)
        if row.block == (None, None):
            return ()
        return (down,) if row.block == (1, None) else (down, 1, across, 1)


_NVFP4_GROUP = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
ALGORITHMS: dict[str, Algorithm] = {
    row.ours: row
    for row in (
        Algorithm("nvfp4", "W4A16_NVFP4", "F8_E4M3", 16, _NVFP4_GROUP),
        Algorithm("mxfp8_e4m3", "MXFP8", "U8", 32),
        Algorithm("mxfp4_e2m1", "mxfp4", "U8", 32, caution="no engine loads ModelOpt's mxfp4 checkpoints"),
        Algorithm("fp8_e4m3_channel", "FP8_PER_CHANNEL_PER_TOKEN", "F32"),
        Algorithm("fp8_e4m3_128x128", "fp8_pb_wo", "F32"),
        Algorithm(
            "fp8_e4m3",
            "FP8",
            "F32",
            group={"dynamic": False, "num_bits": 8, "type": "float"},
            caution="without an input_scale per layer loaders of ModelOpt's FP8 take 1 or unset memory for it",
        ),
    )
}


def _refusal(weight: Weight) -> str | None:
    if weight.format.name not in ALGORITHMS:
        return f"it has no {weight.format.name}"
    return matrix_refusal(weight)


def _contents(weight: Weight) -> tuple[Content, ...]:
    row, (rows, columns) = weight.format, weight.shape
    algorithm = ALGORITHMS[row.name]
    codes_dtype = "U8" if row.element.stored_bits < 8 else "F8_E4M3"
    codes = Entry(weight.name, codes_dtype, (rows, packed_columns(row, columns)))
    scales = Entry(weight.name + "_scale", algorithm.scales, algorithm.scale_shape(weight.shape))
    found = (Content(codes, CODES), Content(scales, SCALES))
    if row.tensor_scale is None:
        return found
    return (*found, Content(Entry(weight.name + "_scale_2", "F32", ()), DECODE))


def _modules(weights: Sequence[Weight]) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = {}
    for weight in weights:
        modules.setdefault(weight.format.name, []).append(module_of(weight))
    return modules


def _settings(weights: Sequence[Weight], ignored: Sequence[str]) -> dict[str, object]:
    modules = _modules(weights)
    settings: dict[str, object] = {"quant_method": "modelopt", "producer": PRODUCER, "ignore": sorted(ignored)}
    if len(modules) > 1:
        return settings | {"quant_algo": MIXED, "quantized_layers": _layers(modules)}
    algorithm = ALGORITHMS[next(iter(modules))]
    settings["quant_algo"] = algorithm.name
    if algorithm.group is not None:
        group = {"weights": dict(algorithm.group), "input_activations": None, "targets": ["Linear"]}
        settings["config_groups"] = {"group_0": group}
    return settings


def _beside(weights: Sequence[Weight], ignored: Sequence[str]) -> dict[str, dict[str, object]]:
    modules = _modules(weights)
    quantization: dict[str, object] = {"kv_cache_quant_algo": None, "exclude_modules": sorted(ignored)}
    if len(modules) > 1:
        quantization |= {"quant_algo": MIXED, "quantized_layers": _layers(modules)}
    else:
        quantization |= _stated(ALGORITHMS[next(iter(modules))])
    return {PRODUCER_CONFIG: {"producer": PRODUCER, "quantization": quantization}}


def _stated(algorithm: Algorithm) -> dict[str, object]:
    stated: dict[str, object] = {"quant_algo": algorithm.name}
    return stated if algorithm.group_size is None else stated | {"group_size": algorithm.group_size}


def _layers(modules: Mapping[str, Sequence[str]]) -> dict[str, object]:
    return {name: _stated(ALGORITHMS[format]) for format in sorted(modules) for name in sorted(modules[format])}


def _weights(disk: OnDisk) -> list[Weight]:
    return found_weights(disk, WEIGHT + "_scale", lambda module: _weight(module, disk))


def _weight(module: str, disk: OnDisk) -> Weight:
    """The weight of a module, its format by the dtypes and shapes of its tensors; raises ValueError for a misfit."""
    name = module + WEIGHT
    codes, scales = disk.tensors.get(name), disk.tensors[name + "_scale"]
    if codes is None:
        raise ValueError(f"has a weight_scale, but {name} is missing (modelopt)")
    if len(codes.shape) != 2:
        raise ValueError(f"{list(codes.shape)} is no shape of a matrix of codes (modelopt)")
    rows, packed = codes.shape
    for algorithm in ALGORITHMS.values():
        row = FORMATS[algorithm.ours]
        shape = (rows, packed * 8 // row.element.stored_bits)
        weight = Weight(name, shape, resolve(row, dialect="modelopt"), disk.dtype)
        expected = {content.entry.name: content.entry for content in _contents(weight)}
        fits = codes.dtype == expected[name].dtype and scales.dtype == algorithm.scales
        if fits and (name + "_scale_2" in expected) == (name + "_scale_2" in disk.tensors):
            if scales.shape != algorithm.scale_shape(shape):
                continue
            check_fit(_contents(weight), disk.tensors, algorithm.name)
            return weight
    known = ", ".join(algorithm.name for algorithm in ALGORITHMS.values())
    raise ValueError(
        f"weight {codes.dtype} {list(codes.shape)} with weight_scale {scales.dtype} {list(scales.shape)} is none of "
        f"{known}"
    )


def _remarks(weights: Sequence[Weight]) -> list[str]:
    cautions = {ALGORITHMS[weight.format.name].caution: weight.format.name for weight in weights}
    notes = [f"{name}: {caution}." for caution, name in cautions.items() if caution]
    return [*notes, "transformers does not load ModelOpt checkpoints; vLLM, SGLang and TensorRT-LLM do."]


MODELOPT = Layout(
    name="modelopt",
    meaning="NVIDIA ModelOpt's unified checkpoint for vLLM, SGLang and TensorRT-LLM, with both configuration files",
    source="NVIDIA ModelOpt 0.47; vLLM 0.33 (read)",
    formats=tuple(ALGORITHMS),
    refusal=_refusal,
    contents=_contents,
    settings=_settings,
    weights=_weights,
    dialects=("modelopt",),
    beside=_beside,
    remarks=_remarks,
)
