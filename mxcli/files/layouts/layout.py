"""The Layout row: names, dtypes and shapes of a quantized weight in a file, and the configuration that describes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mxcli.errors import InputError, printable, together
from mxcli.files.dialect import quantization_settings
from mxcli.files.directory import SAFETENSORS
from mxcli.files.layouts.known_settings import KnownSetting
from mxcli.files.layouts.loaders import Hazard, Ignored
from mxcli.files.layouts.parts import Part
from mxcli.files.tensors import Array, TensorInfo, byte_count
from mxcli.numerics.blocks import COLUMN, ROW, Quantized, divides, grid_shape
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.scheme import Scheme

QUANTIZATION_CONFIG = "quantization_config"
WEIGHT = ".weight"
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
FP8_MARKED = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
"""Formats of ComfyUI's markers whose codes and scales are stored as in other files, and the dtype of the codes."""

Config = Mapping[str, object]


class Misfits(InputError):  # noqa: N818 - named after the weights
    """Weights that do not fit their configuration: `faults` by weight name; `sound` are the others."""

    faults: Mapping[str, str] = {}
    sound: Sequence[Weight] = ()


class Unread(InputError):  # noqa: N818 - named after the weights
    """Weights whose configuration is valid and states a format that this layout does not read; `sound` are others,
    `count` is their number."""

    sound: Sequence[Weight] = ()
    count: int = 0


class UnreadFormat(ValueError):  # noqa: N818 - named after the format
    """The format of one weight, which this layout does not read; nothing may be wrong with it."""


@dataclass(frozen=True, slots=True)
class Transforms:
    """Transforms of a model that its configuration states. Values as stored are those of the model unless there is a
    `refusal`, which says what loaders apply in addition; `note` reports transforms that weights already contain.
    `tensors` hold the transforms themselves."""

    refusal: str | None = None
    note: str | None = None
    tensors: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class InputScale:
    """The static scale of a layer's inputs and their amax: `decode` scales back; `encode` is the factor that producers
    of a format with a tensor scale multiply by (1 without one)."""

    amax: float
    decode: float
    encode: float


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix, or stack of matrices, that is quantized as one.

    `name` and `dtype` are those of the plain tensor, `shape` is as quantized: blocks run along its last dimension, so
    with `axis` COLUMN the last two dimensions are those of the plain tensor exchanged. `variant` is the way it is
    stored if a layout reads more than one ("": the way it writes). With `input_scale` the inputs of its layer are
    quantized too. `adjusting` are the tensors next to its codes that change the decoded values.
    """

    name: str
    shape: tuple[int, ...]
    scheme: Scheme
    dtype: str
    axis: str = ROW
    variant: str = ""
    input_scale: InputScale | None = None
    adjusting: tuple[Entry, ...] = ()

    @property
    def format(self) -> BlockFormat:
        """Return the block format of its codes."""
        return self.scheme.format


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write, as a header describes it; `block_type` as in TensorInfo."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    block_type: str = ""

    @property
    def nbytes(self) -> int:
        """Return its bytes."""
        return byte_count(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Content:
    """An entry and the part of a quantized weight that it holds."""

    entry: Entry
    holds: Part

    def of(self, quantized: Quantized) -> Array:
        """Return the array to write as the entry."""
        return self.holds.store(quantized, self.entry.dtype)


@dataclass(frozen=True, slots=True)
class OnDisk:
    """The input of a layout's reader: the tensors of a source, its config.json, hf_quant_config.json if there is one,
    the combined metadata of its files, and the bytes of a tensor of a few (None: they cannot be read)."""

    tensors: Mapping[str, TensorInfo]
    config: Config
    producer_config: Config = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    bytes_of: Callable[[TensorInfo], bytes | None] = lambda info: None

    @property
    def settings(self) -> Config:
        """Return the quantization_config, of the model or of its first part with one; empty without one."""
        return quantization_settings(self.config)

    @property
    def dtype(self) -> str:
        """Return the dtype of the plain weights: the model's according to config.json, else BF16."""
        return self.stated_dtype or "BF16"

    @property
    def stated_dtype(self) -> str | None:
        """Return the model's dtype according to config.json; None if it states none."""
        for part in (self.config, *(part for part in self.config.values() if isinstance(part, Mapping))):
            stated = part.get("dtype", part.get("torch_dtype"))
            if isinstance(stated, str) and stated.removeprefix("torch.") in DTYPES:
                return DTYPES[stated.removeprefix("torch.")]
        return None


@dataclass(frozen=True, slots=True)
class ForeignWeight:
    """A weight in one tensor whose codes are not one of our formats: the plain tensor it stands for has its name, and
    `values(array as read, dtype)` returns its values in a dtype."""

    plain: Entry
    values: Callable[[Array, str], Array]


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to store quantized weights.

    `formats` are the names of the formats it can hold. `refusal(weight)` returns why it cannot hold a weight (None: it
    can), `contents(weight)` what is stored of it. `settings(weights, ignored modules)` returns the quantization_config,
    `extra_configs` of the same further configuration files by name, `metadata(weights, names)` the `__metadata__` of
    every file, given all weights and the other tensors, and `remarks(weights)` notes for the user. `weights(disk)`
    finds the weights again and raises InputError if tensors and configuration do not fit; `foreign(disk)` finds those
    in other codes. `kind` is the kind of weight file it is written in. `ignored(disk)` is the list of modules that
    loaders leave plain (None: there is no list), `hazards` what they silently get wrong, `transforms` what they apply
    to weights or activations besides scales. `known_settings` are those of its configuration whose values loaders know.

    `stack_names(config)` is the template of the names of stacks of experts, of `module` and `part`, where its loaders
    take those (None: they take single experts).

    `settings_keys` are the keys of config.json that hold the settings, each all of them.

    `dialects` are the names that files in this layout are recognized by; with `needs_config` they cannot be read
    without a configuration. With `model_scales` loaders convert binary32 scales to the model's dtype; with `rotations`
    a Hadamard transform of the weights is stored too, so that it can be undone; with `names_rules` the configuration
    states the rules and axis of each weight; with `whole_stacks` loaders take all stacks of experts of a module or
    none; with `sole_file` they take a model in one file. Formats in `input_scales` may be stored with a scale of the
    layer's inputs, those in `needs_input_scales` must. `fused_by` names the loader that fuses q, k, v and gate, up if
    the usual one does not ("": it does); unless `fuses`, none does. `marked` are the formats of markers whose codes it
    reads, with the dtype of the codes; `markers(disk)` are further tensors that only describe others. `taken` are
    roles besides those of linear layers whose quantized weights its loaders take. Unless `is_chosen`, it is written
    only by name: engines load it with a further package.
    """

    name: str
    meaning: str
    source: str
    formats: tuple[str, ...]
    refusal: Callable[[Weight], str | None]
    contents: Callable[[Weight], tuple[Content, ...]]
    settings: Callable[[Sequence[Weight], Sequence[str]], dict[str, object]]
    weights: Callable[[OnDisk], list[Weight]]
    settings_keys: tuple[str, ...] = (QUANTIZATION_CONFIG,)
    aliases: tuple[str, ...] = ()
    dialects: tuple[str, ...] = ()
    kind: str = SAFETENSORS
    foreign: Callable[[OnDisk], list[ForeignWeight]] = lambda disk: []
    extra_configs: Callable[[Sequence[Weight], Sequence[str]], dict[str, dict[str, object]]] = lambda weights, names: {}
    metadata: Callable[[Sequence[Weight], Sequence[str]], dict[str, str]] = lambda weights, names: {}
    remarks: Callable[[Sequence[Weight]], list[str]] = lambda weights: []
    ignored: Callable[[OnDisk], Ignored | None] = lambda disk: None
    hazards: Callable[[OnDisk, Sequence[Weight]], list[Hazard]] = lambda disk, weights: []
    transforms: Callable[[OnDisk], Transforms] = lambda disk: Transforms()
    known_settings: Sequence[KnownSetting] = ()
    stack_names: Callable[[Config], str | None] = lambda config: None
    fused_by: str = ""
    fuses: bool = True
    is_chosen: bool = True
    marked: Mapping[str, str] = field(default_factory=lambda: FP8_MARKED)
    markers: Callable[[OnDisk], frozenset[str]] = lambda disk: frozenset()
    model_scales: bool = False
    rotations: bool = False
    names_rules: bool = False
    needs_config: bool = False
    whole_stacks: bool = False
    sole_file: bool = False
    input_scales: tuple[str, ...] = ()
    needs_input_scales: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()


def quantized_from(weight: Weight, stored: Sequence[tuple[Content, Array]]) -> Quantized:
    """Return the record of a weight from its contents as read; a tensor scale that is not stored is 1."""
    fields: dict[str, Any] = {"tensor_scale": None, "tensor_encode": 1.0}
    for content, array in stored:
        fields |= content.holds.load(array, weight.format, weight.shape)
    return Quantized(scheme=weight.scheme, shape=weight.shape, stats=None, per_block=None, **fields)


def matrix_refusal(weight: Weight) -> str | None:
    """Return why a layout of module matrices, [out, in] and without padding, cannot hold a weight; None if it can."""
    if not weight.name.endswith(WEIGHT) or len(weight.name) == len(WEIGHT):
        return "it names the weights of modules only (MODULE.weight)"
    if len(weight.shape) != 2:
        return f"it holds matrices only, not {len(weight.shape)} dimensions"
    if weight.axis == COLUMN:
        return "it holds layers stored [out, in] only"
    if not divides(weight.format, weight.shape):
        return f"it stores no padding, and {weight.shape[-1]} is not a multiple of {weight.format.block[1]}"
    return None


def refusal(layout: Layout, weight: Weight) -> str | None:
    """Return why a layout cannot hold a weight; None if it can."""
    if weight.scheme.hadamard is not None and not layout.rotations:
        return (
            f"its loaders do not support the {weight.scheme.hadamard.name} transform and would use transformed weights"
        )
    if weight.adjusting:
        names = ", ".join(printable(entry.name) for entry in weight.adjusting)
        return f"it has no place for {names}, without which the weight is another one"
    return layout.refusal(weight)


def module_of(weight: Weight) -> str:
    """Return the module whose weight it is."""
    return weight.name.removesuffix(WEIGHT)


def found_weights(disk: OnDisk, ending: str, weight_of: Callable[[str], Weight | None]) -> list[Weight]:
    """Return the weights that `weight_of` finds for tensor names with that ending, which is cut off; see weights_of."""
    names = (name for name in disk.tensors if name.endswith(ending) and len(name) > len(ending))
    return weights_of((name.removesuffix(ending) for name in names), weight_of)


def weights_of(names: Iterable[str], weight_of: Callable[[str], Weight | None]) -> list[Weight]:
    """Return the weights that `weight_of` finds for names; None is skipped. Raises Misfits with every ValueError that
    it raises; Unread if these are of formats that are not read."""
    faults, found, unread = dict[str, str](), list[Weight](), dict[str, str]()
    for name in names:
        try:
            weight = weight_of(name)
        except UnreadFormat as format:
            unread[name] = str(format)
        except ValueError as fault:
            faults[name] = f"{fault}" if str(fault).endswith((".", "?")) else f"{fault}."
        else:
            if weight is not None:
                found.append(weight)
    if faults:
        problems = [f"{printable(name)}: {fault}" for name, fault in faults.items()]
        error = together(Misfits, "Weights that do not fit their quantization_config", problems)
        assert isinstance(error, Misfits)
        error.faults, error.sound = faults, found
        raise error
    if unread:
        first, why = next(iter(unread.items()))
        more = f" (and {len(unread) - 1:,} more)" if len(unread) > 1 else ""
        other = Unread(f"{printable(first)}{more}: {why}.")
        other.sound, other.count = found, len(unread)
        raise other
    return found


def check_fit(contents: Sequence[Content], tensors: Mapping[str, TensorInfo], format: str) -> None:
    """Raise ValueError unless every entry is among the tensors with its dtype and shape; E8M0 scales may have the dtype
    F8_E8M0 or U8."""
    for entry in (content.entry for content in contents):
        stored = tensors.get(entry.name)
        if stored is None:
            raise ValueError(f"{printable(entry.name)} is missing ({format})")
        same_bytes = stored.dtype == entry.dtype or {stored.dtype, entry.dtype} == {"U8", "F8_E8M0"}
        if not same_bytes or stored.shape != entry.shape:
            raise ValueError(
                f"{printable(entry.name)} is {stored.dtype} {list(stored.shape)}; {format} needs {entry.dtype} "
                f"{list(entry.shape)}"
            )


def scale_shape(weight: Weight) -> tuple[int, ...]:
    """Return the shape of the grid of scales; [1] for one scale of the whole tensor."""
    return (1,) if weight.format.block == (None, None) else grid_shape(weight.format, weight.shape)
