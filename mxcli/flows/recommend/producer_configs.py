"""A plan as configuration files of other producers, with names as their loaders expect: the format of each layer, and
the layers left alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mxcli.errors import RefusedError
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import PREFERRED
from mxcli.flows.plan.plan import Plan
from mxcli.flows.write.arrange import arrange
from mxcli.flows.write.ignored import ignored_modules

WEIGHT = ".weight"
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Modules:
    """Module paths by format, in the order of the source, and those left as they are; `head` are output heads."""

    by_format: Mapping[str, Sequence[str]]
    ignored: Sequence[str]
    head: frozenset[str]


@dataclass(frozen=True, slots=True)
class ProducerConfig:
    """A file for one producer: what it says of each of our formats that the producer has, and its text."""

    file: str
    producer: str
    formats: Mapping[str, Mapping[object, object]]
    text: Callable[[Modules, Mapping[str, Mapping[object, object]]], str]
    source: str


def producer_files(checkpoint: Checkpoint, plan: Plan) -> tuple[dict[str, str], list[str]]:
    """Return text by file name for every producer that has all formats of a plan, and a note on each that has not."""
    files, notes = dict[str, str](), list[str]()
    try:
        arrangement = arrange(checkpoint, plan, PREFERRED.name)
    except RefusedError as refused:
        modules = _planned(checkpoint, plan)
        notes.append(f"No configuration for compressed-tensors and llm-compressor: {refused.reasons[0]}")
    else:
        by_format: dict[str, list[str]] = {}
        for weight in arrangement.weights:
            by_format.setdefault(weight.format.name, []).append(weight.name.removesuffix(WEIGHT))
        modules = Modules(by_format, arrangement.ignored, _heads(checkpoint))
        settings = PREFERRED.settings(arrangement.weights, arrangement.ignored)
        files["compressed-tensors.json"] = json.dumps({"quantization_config": settings}, indent=2)
        files["llm-compressor.yaml"] = _llm_compressor(settings)
    for row in PRODUCERS:
        missing = sorted(set(modules.by_format) - set(row.formats))
        if missing:
            notes.append(f"No configuration for {row.producer}: it has no {', '.join(missing)}.")
        else:
            files[row.file] = row.text(modules, row.formats)
    return files, notes


def _planned(checkpoint: Checkpoint, plan: Plan) -> Modules:
    by_format: dict[str, list[str]] = {}
    for step in plan.quantized:
        if step.scheme is not None:
            by_format.setdefault(step.scheme.format.name, []).append(step.tensor.name.removesuffix(WEIGHT))
    kept = [step.tensor for step in plan.tensors if step.scheme is None]
    names = [step.tensor.name for step in plan.quantized]
    return Modules(by_format, ignored_modules(kept, checkpoint.tied, names), _heads(checkpoint))


def _heads(checkpoint: Checkpoint) -> frozenset[str]:
    heads = {info.name for info in checkpoint.tensors.values() if info.role == _HEAD}
    return frozenset(name.removesuffix(WEIGHT) for name in (*heads, *checkpoint.tied))


def _llm_compressor(settings: Mapping[str, object]) -> str:
    """Return a recipe for `oneshot`: one modifier with the config groups; their format is inferred."""
    groups = settings["config_groups"]
    assert isinstance(groups, dict)
    modifier = {
        "ignore": settings["ignore"],
        "config_groups": {
            name: {key: value for key, value in group.items() if key != "format"} for name, group in groups.items()
        },
    }
    return yaml_text({"quant_stage": {"quant_modifiers": {"QuantizationModifier": modifier}}})


def _modelopt(modules: Modules, formats: Mapping[str, Mapping[object, object]]) -> str:
    """Return a recipe for `load_recipe`: all quantizers off, then the weight quantizer of each module."""
    entries: list[object] = [{"quantizer_name": "*", "enable": False}]
    entries += [
        {"quantizer_name": f"{module}.weight_quantizer", "cfg": formats[name]}
        for name, names in modules.by_format.items()
        for module in names
    ]
    return yaml_text(
        {
            "metadata": {"recipe_type": "ptq", "description": "Weights only, chosen by mxcli recommend."},
            "quantize": {"algorithm": "max", "quant_cfg": entries},
        }
    )


def _auto_round(modules: Modules, formats: Mapping[str, Mapping[object, object]]) -> str:
    """Return a layer_config with full layer names: unnamed heads stay unquantized; every other kept layer is listed
    with 16 bits."""
    config: dict[str, object] = {
        module: {"act_bits": 16, "act_data_type": "float", **{str(key): value for key, value in formats[name].items()}}
        for name, names in modules.by_format.items()
        for module in names
    }
    kept = {"bits": 16, "act_bits": 16, "data_type": "float", "act_data_type": "float"}
    config |= {module: kept for module in modules.ignored if module not in modules.head}
    return json.dumps(config, indent=2)


def _dynamic(bits: object, size: int, scale: str) -> dict[object, object]:
    return {"num_bits": bits, "block_sizes": {-1: size, "type": "dynamic", "scale_bits": scale}}


def _grouped(bits: int, data_type: str, group_size: object) -> dict[object, object]:
    return {"bits": bits, "data_type": data_type, "group_size": group_size, "sym": True}


PRODUCERS = (
    ProducerConfig(
        "modelopt.yaml",
        "ModelOpt",
        {
            "nvfp4": _dynamic("e2m1", 16, "e4m3"),
            "mxfp4_e2m1": _dynamic("e2m1", 32, "e8m0"),
            "mxfp6_e2m3": _dynamic("e2m3", 32, "e8m0"),
            "mxfp6_e3m2": _dynamic("e3m2", 32, "e8m0"),
            "mxfp8_e4m3": _dynamic("e4m3", 32, "e8m0"),
            "mxfp8_e5m2": _dynamic("e5m2", 32, "e8m0"),
            "mxint8": _dynamic(8, 32, "e8m0"),
            "fp8_e4m3": {"num_bits": "e4m3", "axis": None},
            "fp8_e4m3_channel": {"num_bits": "e4m3", "axis": 0},
            "fp8_e4m3_128x128": {"num_bits": "e4m3", "block_sizes": {-1: 128, -2: 128}},
        },
        _modelopt,
        "NVIDIA/Model-Optimizer a2fbac7: modelopt_recipes/configs/numerics, modelopt/recipe/loader.py",
    ),
    ProducerConfig(
        "auto-round.json",
        "auto-round",
        {
            "nvfp4": _grouped(4, "nv_fp", 16),
            "mxfp4_e2m1": _grouped(4, "mx_fp", 32),
            "mxfp6_e2m3": _grouped(6, "mx_fp", 32),
            "mxfp8_e4m3": _grouped(8, "mx_fp", 32),
            "fp8_e4m3": _grouped(8, "fp", 0),
            "fp8_e4m3_channel": _grouped(8, "fp", -1),
        },
        _auto_round,
        "intel/auto-round b9f3d00: auto_round/schemes.py, compressors/layer_config/resolver.py",
    ),
)


def yaml_text(value: object) -> str:
    """Return plain data in block style; strings are quoted as in JSON, which YAML takes."""
    return "\n".join(_yaml_lines(value, ""))


def _yaml_lines(value: object, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _yaml_item(f"{indent}{key}:", part, indent + "  ")
    elif isinstance(value, (list, tuple)):
        for part in value:
            first, *rest = _yaml_lines(part, indent + "  ") if _is_nested(part) else [indent + "  " + json.dumps(part)]
            yield f"{indent}- {first.lstrip()}"
            yield from rest


def _yaml_item(head: str, part: object, indent: str) -> Iterator[str]:
    if _is_nested(part):
        yield head
        yield from _yaml_lines(part, indent)
    else:
        yield f"{head} {json.dumps(part)}"


def _is_nested(part: object) -> bool:
    return isinstance(part, (Mapping, list, tuple)) and bool(part)
