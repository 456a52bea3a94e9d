"""The configuration of compressed-tensors: our formats as its QuantizationArgs, and the modules that its groups
target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mxcli.errors import InputError, printable, together
from mxcli.files.layouts.layout import Config, OnDisk, Transforms, Unread
from mxcli.files.layouts.targets import EXPERTS, LINEAR, invalid_targets, read_targets

TRANSFORM_CONFIG = "transform_config"
_KEYS = ("num_bits", "type", "strategy", "group_size", "block_structure")


@dataclass(frozen=True, slots=True)
class ConfigScheme:
    """The QuantizationArgs of one of our formats: `weights`, `activations` and, with a scale stored under the module's
    name and `input_scale`, `calibrated`."""

    block_format: str
    format: str
    weights: Mapping[str, object]
    activations: Mapping[str, object] | None = None
    calibrated: Mapping[str, object] | None = None
    input_scale: str = ""
    scale_dtype: str = "U8"
    symbols: Mapping[str, object] = field(default_factory=lambda: {"type": "float", "symmetric": True})

    def group(self, *, calibrated: bool) -> dict[str, object]:
        """Return a config group without its targets."""
        stated = self.calibrated if calibrated else self.activations
        activations = None if stated is None else {**self.symbols, "dynamic": True, **stated}
        return {
            "format": self.format,
            "weights": {**self.symbols, **self.weights, "dynamic": False},
            "input_activations": activations,
            "output_activations": None,
        }

    def means(self, args: Mapping[str, object]) -> bool:
        """Return whether QuantizationArgs of weights state this scheme."""
        ours = {**self.symbols, **self.weights}
        return all(ours.get(key) == args.get(key) for key in _KEYS)


def _mx(block_format: str, format: str, bits: int) -> ConfigScheme:
    group = {"num_bits": bits, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    return ConfigScheme(block_format, format, group)


def _fp8(block_format: str, strategy: str, activations: Mapping[str, object], **more: object) -> ConfigScheme:
    weights = {"num_bits": 8, "strategy": strategy, **more}
    return ConfigScheme(block_format, "float-quantized", weights, {"num_bits": 8, **activations}, scale_dtype="F32")


_NVFP4 = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
CONFIG_SCHEMES: dict[str, ConfigScheme] = {
    row.block_format: row
    for row in (
        ConfigScheme(
            "nvfp4",
            "nvfp4-pack-quantized",
            _NVFP4,
            calibrated={**_NVFP4, "dynamic": "local"},
            input_scale="input_global_scale",
            scale_dtype="F8_E4M3",
        ),
        _mx("mxfp4_e2m1", "mxfp4-pack-quantized", 4),
        _mx("mxfp6_e2m3", "mxfp6-pack-quantized", 6),
        _mx("mxfp8_e4m3", "mxfp8-quantized", 8),
        replace(
            _fp8("fp8_e4m3", "tensor", {"strategy": "tensor"}),
            calibrated={"num_bits": 8, "strategy": "tensor", "dynamic": False},
            input_scale="input_scale",
        ),
        _fp8("fp8_e4m3_channel", "channel", {"strategy": "token"}),
        _fp8("fp8_e4m3_128x128", "block", {"strategy": "group", "group_size": 128}, block_structure=[128, 128]),
    )
}


def config_groups(settings: Config, *, is_ours: bool = False) -> list[tuple[Sequence[str], ConfigScheme]]:
    """Return targets and scheme of every config group. Raises Unread for a scheme that is not in CONFIG_SCHEMES, and
    InputError if the tensors are of one (`is_ours`)."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise InputError("config.json: its quantization_config needs config_groups to say what the codes mean.")
    found: list[tuple[Sequence[str], ConfigScheme]] = []
    problems = []
    for name, group in groups.items():
        args = group.get("weights") if isinstance(group, Mapping) else None
        targets = group.get("targets") if isinstance(group, Mapping) else None
        scheme = next((row for row in CONFIG_SCHEMES.values() if isinstance(args, Mapping) and row.means(args)), None)
        if scheme is None or not isinstance(targets, list):
            problems.append(
                f"config.json: config group {printable(name)}: its weights match none of the schemes that mxcli "
                f"reads ({', '.join(CONFIG_SCHEMES)})."
            )
        else:
            found.append((list(map(str, targets)), scheme))
    if problems:
        stated = [group["weights"] for group in groups.values() if isinstance(group, Mapping) and group.get("weights")]
        known = all(isinstance(args, Mapping) and "num_bits" in args for args in stated) and len(stated) == len(groups)
        raise together(Unread if known and not is_ours else InputError, "config.json", problems)
    return found


def schemes_of(groups: Sequence[tuple[Sequence[str], ConfigScheme]]) -> Callable[[str], ConfigScheme]:
    """Return the function from a module to the scheme of the group that targets it: by name, by pattern, by the class
    of linear layers, or else by any other class. It raises ValueError if there is none, or an invalid pattern."""
    faults = invalid_targets(target for targets, _ in groups for target in targets)
    targets = read_targets(groups)
    others = [name for name in targets.classes if name not in (LINEAR, *EXPERTS)]

    def scheme_of(module: str) -> ConfigScheme:
        if faults:
            raise ValueError(faults[0])
        scheme = targets.of(module) or next((targets.classes[name] for name in others), None)
        if scheme is None:
            raise ValueError("no config group targets it")
        return scheme

    return scheme_of


def transforms_of(disk: OnDisk) -> Transforms:
    """Return the transforms that the configuration states; those of weights alone are in the weights, and the model
    computes the same with them."""
    stated = disk.settings.get(TRANSFORM_CONFIG)
    if not stated:
        return Transforms()
    schemes = stated.get("config_groups") if isinstance(stated, Mapping) else None
    places = _places(schemes) if isinstance(schemes, Mapping) else {}
    online = sorted(name for name, places in places.items() if not places or places - _OF_WEIGHTS)
    if places and not online:
        return Transforms(
            note=f"The configuration states transforms that its weights contain ({', '.join(map(printable, places))}); "
            "they stay in the values, and the model computes the same."
        )
    where = {f"{name}_{place}" for name, each in places.items() for place in each}
    held = frozenset(name for name in disk.tensors if name.rpartition(".")[0].rpartition(".")[2] in where)
    what = f" ({', '.join(map(printable, online))})" if online else ""
    return Transforms(
        f"its {TRANSFORM_CONFIG} states transforms{what} that loaders apply to activations: its weights alone are "
        "other ones",
        tensors=held,
    )


def _places(schemes: Mapping[str, object]) -> dict[str, set[str]]:
    """Return the places that each transform is applied at; none for a transform that is not understood."""
    found: dict[str, set[str]] = {}
    for name, scheme in schemes.items():
        applied = scheme.get("apply") if isinstance(scheme, Mapping) else None
        each = [one for one in applied if isinstance(one, Mapping)] if isinstance(applied, list) else []
        found[str(name)] = {str(one.get("location")) for one in each}
    return found


_OF_WEIGHTS = {"weight_input", "weight_output"}
