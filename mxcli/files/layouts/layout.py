"""What a layout is: how a quantized weight is named, typed and shaped in a file, and what config.json says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mxcli.errors import InputError, printable, together
from mxcli.files.directory import SAFETENSORS
from mxcli.files.layouts.loaders import Hazard, Ignored
from mxcli.files.layouts.parts import Part
from mxcli.files.tensors import Array, TensorInfo, byte_count
from mxcli.numerics.blocks import COLUMN, ROW, Quantized, divides, grid_shape
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.scheme import Scheme

QUANTIZATION_CONFIG = "quantization_config"
WEIGHT = ".weight"
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}

Config = Mapping[str, object]


class Misfits(InputError):  # noqa: N818 - it tells of weights
    """Weights that do not fit their configuration: `faults` by the name they go by; `sound` are the others."""

    faults: Mapping[str, str] = {}
    sound: Sequence[Weight] = ()


@dataclass(frozen=True, slots=True)
class InputScale:
    """The scale of a layer's inputs, known before they come, and their amax: `decode` scales back; `encode` is what
    producers of a format with a tensor scale multiply by (1 without one)."""

    amax: float
    decode: float
    encode: float


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix, or stack of matrices, that is quantized as one.

    `name` and `dtype` are those of the plain tensor, `shape` is as quantized: blocks run along its last
    dimension, so with `axis` COLUMN the last two dimensions are those of the plain tensor exchanged. `variant` says
    how it is stored where a layout reads more than one way ("": the way that it writes). With `input_scale` the
    inputs of its layer are quantized too.
    """

    name: str
    shape: tuple[int, ...]
    scheme: Scheme
    dtype: str
    axis: str = ROW
    variant: str = ""
    input_scale: InputScale | None = None

    @property
    def format(self) -> BlockFormat:
        """The block format of its codes."""
        return self.scheme.format


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to be written, as a header describes it; `block_type` as of a TensorInfo."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    block_type: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes it occupies."""
        return byte_count(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Content:
    """An entry and the part of a quantized weight that it holds."""

    entry: Entry
    holds: Part

    def of(self, quantized: Quantized) -> Array:
        """The array to write as the entry."""
        return self.holds.store(quantized, self.entry.dtype)


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What a layout finds its weights in: the tensors of a source, its config.json, hf_quant_config.json where there
    is one, and the metadata of its files together."""

    tensors: Mapping[str, TensorInfo]
    config: Config
    producer_config: Config = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> Config:
        """The quantization_config; empty without one."""
        found = self.config.get(QUANTIZATION_CONFIG)
        return found if isinstance(found, Mapping) else {}

    @property
    def dtype(self) -> str:
        """The dtype of the plain weights: what config.json says of the model, else BF16."""
        return self.stated_dtype or "BF16"

    @property
    def stated_dtype(self) -> str | None:
        """The dtype that config.json says the model has; None where it says nothing."""
        for part in (self.config, *(part for part in self.config.values() if isinstance(part, Mapping))):
            stated = part.get("dtype", part.get("torch_dtype"))
            if isinstance(stated, str) and stated.removeprefix("torch.") in DTYPES:
                return DTYPES[stated.removeprefix("torch.")]
        return None


@dataclass(frozen=True, slots=True)
class ForeignWeight:
    """A weight in codes that are no format of ours, in one tensor: the plain tensor it stands for has its name, and
    `values(array as read, dtype)` are its values in a dtype."""

    plain: Entry
    values: Callable[[Array, str], Array]


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to store quantized weights.

    `formats` names the rows it can hold, `refusal(weight)` says why it cannot hold one (None: it can), `contents` what
    is stored of it. `settings(weights, ignored modules)` is the quantization_config, `beside` further configuration
    files by name, `metadata(weights, names)` what the header of every file says of all the weights and of the other
    tensors, `remarks(weights)` what a user may not expect. `weights` finds the weights again and raises InputError
    where tensors and configuration do not fit, `foreign` finds those in codes of others; `kind` is the kind of weight
    file it is written in. `dialects` are the names that files in this layout are recognised by, and `needs_config` says
    that without a configuration they cannot be read. With `model_scales` loaders hold binary32 scales in the dtype of
    the model; with `rotations` a Hadamard transform of the weights is stored too, so that it can be undone; with
    `names_rules` the configuration says by which rules each weight was made, and along which axis; with `whole_stacks`
    loaders take all stacks of experts of a module or none. Formats in `input_scales` may be stored with
    a scale of the layer's inputs, and those in `needs_input_scales` must. `ignored` is what loaders are told to leave
    alone (None: they are told nothing), `hazards` what they get wrong in silence.
    """

    name: str
    meaning: str
    source: str
    formats: tuple[str, ...]
    refusal: Callable[[Weight], str | None]
    contents: Callable[[Weight], tuple[Content, ...]]
    settings: Callable[[Sequence[Weight], Sequence[str]], dict[str, object]]
    weights: Callable[[OnDisk], list[Weight]]
    aliases: tuple[str, ...] = ()
    dialects: tuple[str, ...] = ()
    kind: str = SAFETENSORS
    foreign: Callable[[OnDisk], list[ForeignWeight]] = lambda disk: []
    beside: Callable[[Sequence[Weight], Sequence[str]], dict[str, dict[str, object]]] = lambda weights, ignored: {}
    metadata: Callable[[Sequence[Weight], Sequence[str]], dict[str, str]] = lambda weights, names: {}
    remarks: Callable[[Sequence[Weight]], list[str]] = lambda weights: []
    ignored: Callable[[OnDisk], Ignored | None] = lambda disk: None
    hazards: Callable[[OnDisk, Sequence[Weight]], list[Hazard]] = lambda disk, weights: []
    model_scales: bool = False
    rotations: bool = False
    names_rules: bool = False
    needs_config: bool = False
    whole_stacks: bool = False
    input_scales: tuple[str, ...] = ()
    needs_input_scales: tuple[str, ...] = ()


def quantized_from(weight: Weight, stored: Sequence[tuple[Content, Array]]) -> Quantized:
    """The record of a weight from its contents as read; a tensor scale that is not stored is 1."""
    fields: dict[str, Any] = {"tensor_scale": None, "tensor_encode": 1.0}
    for content, array in stored:
        fields |= content.holds.load(array, weight.format, weight.shape)
    return Quantized(scheme=weight.scheme, shape=weight.shape, stats=None, per_block=None, **fields)


def matrix_refusal(weight: Weight) -> str | None:
    """Why a layout of matrices of modules, [out, in] and without padding, cannot hold a weight; None: it can."""
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
    """Why a layout cannot hold a weight; None: it can."""
    if weight.scheme.hadamard is not None and not layout.rotations:
        return (
            f"its loaders know of no {weight.scheme.hadamard.name} transform, and would take the codes for the weights"
        )
    return layout.refusal(weight)


def module_of(weight: Weight) -> str:
    """The module whose weight it is."""
    return weight.name.removesuffix(WEIGHT)


def found_weights(disk: OnDisk, ending: str, weight_of: Callable[[str], Weight | None]) -> list[Weight]:
    """The weights that `weight_of` finds for the names of tensors with that ending, which is cut off; see
    weights_of."""
    names = (name for name in disk.tensors if name.endswith(ending) and len(name) > len(ending))
    return weights_of((name.removesuffix(ending) for name in names), weight_of)


def weights_of(names: Iterable[str], weight_of: Callable[[str], Weight | None]) -> list[Weight]:
    """The weights that `weight_of` finds for names; None is no weight. Raises Misfits with everything that it raises
    ValueError for.
    """
    faults, found = dict[str, str](), list[Weight]()
    for name in names:
        try:
            weight = weight_of(name)
        except ValueError as fault:
            faults[name] = f"{fault}" if str(fault).endswith((".", "?")) else f"{fault}."
        else:
            found += [] if weight is None else [weight]
    if faults:
        problems = [f"{printable(name)}: {fault}" for name, fault in faults.items()]
        error = together(Misfits, "Weights that do not fit their quantization_config", problems)
        assert isinstance(error, Misfits)
        error.faults, error.sound = faults, found
        raise error
    return found


def check_fit(contents: Sequence[Content], tensors: Mapping[str, TensorInfo], format: str) -> None:
    """Raise ValueError unless every entry is among the tensors with its dtype and shape; E8M0 scales may be typed as
    what they are, or as bytes."""
    for entry in (content.entry for content in contents):
        there = tensors.get(entry.name)
        if there is None:
            raise ValueError(f"{printable(entry.name)} is missing ({format})")
        same_bytes = there.dtype == entry.dtype or {there.dtype, entry.dtype} == {"U8", "F8_E8M0"}
        if not same_bytes or there.shape != entry.shape:
            raise ValueError(
                f"{printable(entry.name)} is {there.dtype} {list(there.shape)}; {format} needs {entry.dtype} "
                f"{list(entry.shape)}"
            )


def scale_shape(weight: Weight) -> tuple[int, ...]:
    """The grid of scales; one scale for the whole tensor has the shape [1]."""
    return (1,) if weight.format.block == (None, None) else grid_shape(weight.format, weight.shape)
