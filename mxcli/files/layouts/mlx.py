"""MLX's own modes mxfp4, mxfp8 and nvfp4, as mlx_lm.convert writes them and mlx-lm reads them.

A layer has `weight` (U32: the packed codes, four bytes to a number) and `scales` (U8), and no `biases`; stacks of
experts have one more dimension. A mode fixes bits and group size, so that shapes show it; the configuration states it
too, for all layers and for single ones by path, and must agree. nvfp4 here has no tensor scale. Layers in the mode
affine are integers with a scale and a bias of each group, and are not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mxcli.errors import printable
from mxcli.files.layouts.known_settings import KnownSetting
from mxcli.files.layouts.layout import (
    QUANTIZATION_CONFIG,
    WEIGHT,
    Config,
    Content,
    Entry,
    Layout,
    OnDisk,
    UnreadFormat,
    Weight,
    check_fit,
    found_weights,
    matrix_refusal,
    module_of,
)
from mxcli.files.layouts.loaders import Hazard
from mxcli.files.layouts.parts import CODES, SCALES
from mxcli.files.model_files import CONFIG
from mxcli.files.tensors import TensorInfo
from mxcli.numerics.blocks import grid_shape, packed_columns
from mxcli.numerics.formats import BlockFormat, find_format
from mxcli.numerics.scheme import resolve

QUANTIZATION = "quantization"
"""The key of config.json that mlx-lm reads; its copy under quantization_config is for programs of others."""
SCALES_ENDING, BIASES_ENDING, TENSOR_SCALE_ENDING = ".scales", ".biases", ".global_scale"
AFFINE = "affine"
WORD = 4
"""Bytes of a number that holds codes."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode of MLX: its name, our format, and the bits and group size that it fixes."""

    name: str
    format: BlockFormat
    bits: int
    group_size: int

    @property
    def settings(self) -> dict[str, object]:
        """Return the settings of a layer in this mode."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.name}

    @property
    def numbers_per_scale(self) -> int:
        """Return the numbers of a weight that share a scale."""
        return self.group_size * self.bits // (8 * WORD)


MODES: dict[str, Mode] = {
    row.format.name: row
    for row in (
        Mode("mxfp4", find_format("mxfp4"), 4, 32),
        Mode("mxfp8", find_format("mxfp8"), 8, 32),
        Mode("nvfp4", find_format("e2m1:e4m3:1x16"), 4, 16),
    )
}
_BY_NAME = {row.name: row for row in MODES.values()}


def _refusal(weight: Weight) -> str | None:
    if weight.format.name not in MODES:
        return f"it has no {weight.format.name}"
    return matrix_refusal(weight)


def _contents(weight: Weight) -> tuple[Content, ...]:
    fmt, shape = weight.format, weight.shape
    codes = Entry(weight.name, "U32", (*shape[:-1], packed_columns(fmt, shape[-1]) // WORD))
    scales = Entry(module_of(weight) + SCALES_ENDING, "U8", grid_shape(fmt, shape))
    return Content(codes, CODES), Content(scales, SCALES)


def _settings(weights: Sequence[Weight], ignored: Sequence[str]) -> dict[str, object]:
    """Return the mode of most weights for all layers, and the others by module."""
    usual = Counter(weight.format.name for weight in weights).most_common(1)[0][0]
    others = {
        module_of(weight): MODES[weight.format.name].settings for weight in weights if weight.format.name != usual
    }
    return {**MODES[usual].settings, **dict(sorted(others.items()))}


def _stated(config: Config) -> Config:
    """Return the settings of a configuration or of its first part with some, as mlx-lm reads them; empty without
    any."""
    for part in (config, *(part for part in config.values() if isinstance(part, Mapping))):
        for key in (QUANTIZATION, QUANTIZATION_CONFIG):
            found = part.get(key)
            if isinstance(found, Mapping) and found:
                return found
    return {}


def _weights(disk: OnDisk) -> list[Weight]:
    stated = _stated(disk.config)
    return found_weights(disk, SCALES_ENDING, lambda module: _weight(module, stated, disk))


def _weight(module: str, stated: Config, disk: OnDisk) -> Weight:
    """Return the weight of a module. Raises ValueError if its tensors are not of the mode that is stated for it,
    UnreadFormat for a mode that is not read."""
    codes, scales = disk.tensors.get(module + WEIGHT), disk.tensors[module + SCALES_ENDING]
    if codes is None:
        raise ValueError(f"has {SCALES_ENDING[1:]}, but {printable(module + WEIGHT)} is missing (mlx)")
    own = stated.get(module)
    if scales.dtype in ("F16", "BF16", "F32"):
        group = f" with bits {own.get('bits')}" if isinstance(own, Mapping) else ""
        raise UnreadFormat(
            f"its mode is {AFFINE}{group}, integers with a scale and a bias of each group, which mxcli does not read; "
            "use the checkpoint that it was made from"
        )
    if module + TENSOR_SCALE_ENDING in disk.tensors:
        raise UnreadFormat(
            f"its nvfp4 has a tensor scale for each expert ({TENSOR_SCALE_ENDING[1:]}), which mxcli does not read; use "
            "the checkpoint that it was made from"
        )
    if own is False:
        raise ValueError("has scales, but the configuration states it as plain (false)")
    mode = _mode_of_shapes(codes, scales)
    if stated:
        _check_stated(own if isinstance(own, Mapping) else stated, mode)
    columns = codes.shape[-1] * 8 * WORD // mode.bits
    weight = Weight(module + WEIGHT, (*codes.shape[:-1], columns), resolve(mode.format), disk.dtype)
    check_fit(_contents(weight), disk.tensors, mode.name)
    return weight


def _mode_of_shapes(codes: TensorInfo, scales: TensorInfo) -> Mode:
    """Return the mode whose codes and scales have these shapes. Raises ValueError if none has."""
    if len(codes.shape) in (2, 3) and len(scales.shape) == len(codes.shape):
        for mode in MODES.values():
            if codes.shape[-1] and codes.shape[-1] == scales.shape[-1] * mode.numbers_per_scale:
                return mode
    needs = ", ".join(f"{mode.numbers_per_scale} to a scale in {mode.name}" for mode in MODES.values())
    raise ValueError(
        f"weight {codes.dtype} {list(codes.shape)} with scales {scales.dtype} {list(scales.shape)} fits no mode of "
        f"MLX: a matrix, or a stack of them, has {needs}"
    )


def _check_stated(own: Mapping[str, object], mode: Mode) -> None:
    """Raise ValueError unless settings are those of the mode; a key that is missing has the mode's own value."""
    stated = {"mode": AFFINE, **{key: value for key, value in own.items() if key in mode.settings}}
    differing = [key for key, value in stated.items() if value is not None and value != mode.settings[key]]
    if differing:
        shown = ", ".join(f"{key} {printable(str(stated[key]))}" for key in differing)
        needs = ", ".join(f"{key} {mode.settings[key]}" for key in differing)
        raise ValueError(f"the configuration states {shown} for it; its tensors are {mode.name}, with {needs}")


def _hazards(disk: OnDisk, weights: Sequence[Weight]) -> list[Hazard]:
    stated = _stated(disk.config)
    if not stated:
        need = f'"{QUANTIZATION}" with group_size, bits and mode: mlx-lm builds plain layers without it'
        return [Hazard(CONFIG, f"no {QUANTIZATION}", need, "Restore the config.json written with these weights.")]
    return [*_differing_keys(disk.config), *_without_codes(stated, disk)]


def _differing_keys(config: Config) -> Iterator[Hazard]:
    """Yield a hazard if the two copies of the settings are not the same."""
    ours, copy = config.get(QUANTIZATION), config.get(QUANTIZATION_CONFIG)
    if ours is None and isinstance(copy, Mapping):
        need = f'"{QUANTIZATION}" too: mlx-lm reads that key, and without it refuses settings that name no quant_method'
        yield Hazard(CONFIG, f"{QUANTIZATION_CONFIG} alone", need, f'Copy it to "{QUANTIZATION}".')
    elif ours is not None and copy is not None and ours != copy:
        yield Hazard(
            CONFIG,
            f"{QUANTIZATION} and {QUANTIZATION_CONFIG} differ",
            f"the same settings in both: mlx-lm reads {QUANTIZATION}, other programs {QUANTIZATION_CONFIG}",
            "Make them equal.",
            certain=False,
        )


def _without_codes(stated: Config, disk: OnDisk) -> Iterator[Hazard]:
    """Yield a hazard for each plain layer that the configuration states as quantized."""
    for module, own in stated.items():
        if isinstance(own, Mapping) and module + WEIGHT in disk.tensors and module + SCALES_ENDING not in disk.tensors:
            yield Hazard(
                printable(module),
                f"plain, and stated as {printable(str(own.get('mode', AFFINE)))}",
                "no entry, or false: mlx-lm looks for its scales and refuses to load without them",
                "Remove its entry from config.json.",
            )


def _remarks(weights: Sequence[Weight]) -> list[str]:
    if all(weight.format.tensor_scale is not None or weight.format.has_power_of_two_scales for weight in weights):
        return []
    return [
        "nvfp4 of MLX has no tensor scale: its block scales reach down to 2^-9, so that blocks below 0.09 lose "
        "precision, and those below 0.006 are zero. mxfp4 has no such limit."
    ]


STACKED = {"qwen3_moe": "{module}.switch_mlp.{part}", "gpt_oss": "{module}.experts.{part}"}
"""The names of stacks by model type, where mlx-lm does not put them together itself from quantized matrices."""
_MODE_NAMES = (*_BY_NAME, AFFINE)
_ANY_LAYER = r"(?:[^\n]+\n)?"
MLX_SETTINGS = (
    KnownSetting(_ANY_LAYER + "mode", _MODE_NAMES),
    KnownSetting(_ANY_LAYER + "bits", (1, 2, 3, 4, 5, 6, 8)),
    KnownSetting(_ANY_LAYER + "group_size", (16, 32, 64, 128)),
)


MLX = Layout(
    name="mlx",
    meaning="MLX's modes mxfp4, mxfp8 and nvfp4, as mlx_lm.convert writes them",
    source="mlx 0.32.4 and mlx-lm 0.32.2 on a CPU (run)",
    formats=tuple(MODES),
    refusal=_refusal,
    contents=_contents,
    settings=_settings,
    weights=_weights,
    settings_keys=(QUANTIZATION, QUANTIZATION_CONFIG),
    dialects=("mlx",),
    metadata=lambda weights, names: {"format": "mlx"},
    remarks=_remarks,
    hazards=_hazards,
    known_settings=MLX_SETTINGS,
    stack_names=lambda config: STACKED.get(str(config.get("model_type"))),
    taken=("embedding", "router"),
)
