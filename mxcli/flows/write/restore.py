"""The plain view of a quantized checkpoint: weights are dequantized when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mxcli.backends.backend import Backend
from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint, open_checkpoint, read, with_roles
from mxcli.files.dialect import QUANTIZATION_KEYS, UNSCALED
from mxcli.files.layouts import (
    COLUMN,
    LAYOUTS,
    Content,
    Entry,
    ForeignWeight,
    Layout,
    OnDisk,
    Weight,
    layout_of_dialect,
    quantized_from,
)
from mxcli.files.layouts.adjusted import adjusted
from mxcli.files.model_files import CONFIG
from mxcli.files.record import read_record
from mxcli.files.roles import role_of
from mxcli.files.safetensors import STALE_METADATA
from mxcli.files.tensors import IN_MEMORY, Array, TensorInfo, byte_count
from mxcli.flows.write.omitted import OMITTED_ENDINGS, kinds_omitted, omitted_note
from mxcli.flows.write.restack import recorded_of
from mxcli.flows.write.unread import parts_alone, refuse_unread_parts, refuse_unread_settings, small_bytes
from mxcli.numerics.blocks import Quantized


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantized weight, the tensors that store it, and the function that puts their rows in the order of the plain
    tensor (None: they are)."""

    weight: Weight
    contents: tuple[Content, ...]
    reorder: Callable[[Array], Array] | None = None

    @property
    def plain(self) -> Entry:
        """The dequantized tensor."""
        shape = self.weight.shape
        if self.weight.axis == COLUMN:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return Entry(self.weight.name, self.weight.dtype, shape)

    @property
    def nbytes(self) -> int:
        """Its size in the source in bytes."""
        return sum(content.entry.nbytes for content in self.contents)

    @property
    def working_bytes(self) -> int:
        """Memory of dequantization: the stored tensors, the result, and a copy if it is transposed."""
        return self.nbytes + (2 if self.weight.axis == COLUMN else 1) * self.plain.nbytes

    def quantized(self, arrays: Iterable[Array]) -> Quantized:
        """Return its codes and scales, given the stored tensors as read."""
        found = quantized_from(self.weight, list(zip(self.contents, arrays, strict=True)))
        if self.reorder is None:
            return found
        is_of_rows = len(found.scales) == len(found.packed)
        scales = self.reorder(found.scales) if is_of_rows else found.scales
        return replace(found, packed=self.reorder(found.packed), scales=scales)

    @property
    def matrix(self) -> Weight:
        """The weight itself, or the first of the matrices that it is put together from."""
        return self.weight

    def read(self, checkpoint: Checkpoint) -> Quantized:
        """Read its codes and scales."""
        return self.quantized(read(checkpoint, checkpoint.tensors[each.entry.name]) for each in self.contents)


@dataclass(frozen=True, slots=True)
class Renamed:
    """A plain tensor with another name in the source, and the function that makes it of what is stored: of all of it,
    or of index `at` of its first dimension, and of `others`, each with such an index; `share` tensors are made of the
    same."""

    stored: str
    made_of: Callable[..., Array]
    at: int | None = None
    others: tuple[tuple[str, int | None], ...] = ()
    share: int = 1


@dataclass(frozen=True, slots=True)
class PlainView:
    """The plain view of a source: its layout, its weights by plain name, and all plain tensors in order.

    `unused` are tensors without a plain equivalent (scales of activations, markers), `foreign` are weights in
    third-party codes. `renamed` are the tensors that have other names in the source.
    """

    source: Checkpoint
    layout: Layout
    weights: Mapping[str, StoredWeight]
    tensors: Mapping[str, TensorInfo]
    unused: tuple[str, ...]
    foreign: Mapping[str, ForeignWeight] = field(default_factory=dict)
    renamed: Mapping[str, Renamed] = field(default_factory=dict)

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtypes of the dequantized weights by name."""
        ours = {name: stored.weight.dtype for name, stored in self.weights.items()}
        return ours | {name: weight.plain.dtype for name, weight in self.foreign.items()}

    def read(self, info: TensorInfo) -> Array:
        """Return a plain tensor, or a dequantized `foreign` weight, but not one of `weights`."""
        renamed = self.renamed.get(info.name)
        stored = info if renamed is None and info.name not in self.foreign else self._stored(info.name)
        x = read(self.source, stored, None if renamed is None else renamed.at)
        if info.name in self.foreign:
            x = self.foreign[info.name].values(x, info.dtype)
        if renamed is None:
            return x
        others = (read(self.source, self.source.tensors[name], at) for name, at in renamed.others)
        return renamed.made_of(x, *others)

    def stored_name(self, name: str) -> str:
        """Return the name of a plain tensor, or of a `foreign` weight, in the source."""
        return self.renamed[name].stored if name in self.renamed else name

    def stored_bytes(self, name: str) -> int:
        """Return the bytes of a plain tensor, or of a weight with its scales, in the source."""
        if name in self.weights:
            return self.weights[name].nbytes
        renamed = self.renamed.get(name)
        if renamed is None:
            return self.source.tensors[name].nbytes
        stored = [self.source.tensors[each] for each, _ in ((renamed.stored, renamed.at), *renamed.others)]
        return sum(info.nbytes for info in stored) // renamed.share

    def _stored(self, name: str) -> TensorInfo:
        return self.source.tensors[self.stored_name(name)]

    def working_bytes(self, info: TensorInfo) -> int:
        """Return the memory of reading a plain tensor."""
        if info.name in self.weights:
            return self.weights[info.name].working_bytes
        if info.name in self.foreign:
            # Decoded to binary32, then converted to its dtype.
            return self._stored(info.name).nbytes + byte_count("F32", info.shape) + info.nbytes
        return info.nbytes * (1 if info.name not in self.renamed else 2)

    def checkpoint(self, backend: Backend) -> Checkpoint:
        """Return the plain checkpoint; reading a tensor takes `working_bytes`."""

        def decode(info: TensorInfo) -> Array:
            stored = self.weights.get(info.name)
            return self.read(info) if stored is None else values_of(self.source, stored, backend)

        files = {info.file for info in self.tensors.values() if info.offset == IN_MEMORY}
        decoders: dict[Path, Callable[[TensorInfo], Array]] = dict.fromkeys(files, decode)
        return replace(
            self.source,
            tensors=self.tensors,
            metadata={file: self._plain_metadata(entries) for file, entries in self.source.metadata.items()},
            config=None if self.source.config is None else without_quantization(self.source.config),
            dialect=None,
            notes=(*self.source.notes, *omission_notes(self)),
            decoders={**self.source.decoders, **decoders},
            restored_from=self.layout.name,
            stored=self.source,
        )

    def _plain_metadata(self, entries: Mapping[str, str]) -> dict[str, str]:
        weights = [stored.weight for stored in self.weights.values()]
        of_layout = self.layout.metadata(weights, list(self.tensors)).keys()
        return {key: text for key, text in entries.items() if key not in of_layout}


def open_floats(source: str | Path, *, requantize: bool = False) -> Checkpoint:
    """Open a source to quantize or measure; with `requantize` a quantized one is opened as its plain view.

    Errors are then relative to its dequantized values: the loss of its first quantization is unknown.
    """
    checkpoint = open_checkpoint(source)
    if checkpoint.dialect is None:
        return _without_quantized_settings(checkpoint)
    return plain_view(checkpoint).checkpoint(Cpu()) if requantize else checkpoint


def _without_quantized_settings(checkpoint: Checkpoint) -> Checkpoint:
    """Return a plain source without the settings of codes that its configuration and its files still state."""
    config = None if checkpoint.config is None else without_quantization(checkpoint.config)
    note = _stale_note(checkpoint)
    return replace(checkpoint, config=config, notes=checkpoint.notes if note is None else (*checkpoint.notes, note))


def plain_view(checkpoint: Checkpoint, dtype: str | None = None) -> PlainView:
    """Return the plain view of a quantized source, with weights as `dtype` (None: the recorded dtype of each, else the
    model's, else BF16).

    Raises RefusedError for a layout that cannot be read back, InputError if tensors do not fit their configuration.
    """
    layout = reading_layout(checkpoint)
    disk = on_disk(checkpoint)
    refuse_unread_settings(checkpoint, layout, disk)
    transforms = layout.transforms(disk)
    if transforms.refusal is not None:
        raise RefusedError(
            f"{printable(checkpoint.where)}: {transforms.refusal}. Use the checkpoint that it was made from."
        )
    view = view_of_weights(checkpoint, layout, layout.weights(disk), dtype)
    if not view.weights and not view.foreign:
        raise RefusedError(f"{printable(checkpoint.root)}: holds no quantized weights.")
    alone = parts_alone(view.tensors)
    if alone:
        raise together(InputError, printable(checkpoint.where), alone)
    others = {name: info for name, info in view.tensors.items() if name not in transforms.tensors}
    refuse_unread_parts(checkpoint, others, view.dtypes)
    return view


def view_of_weights(
    checkpoint: Checkpoint,
    layout: Layout,
    found: Iterable[Weight],
    dtype: str | None = None,
    recorded: Mapping[str, str] | None = None,
) -> PlainView:
    """Return the plain view of a source with these weights and all other tensors unchanged; `recorded` are dtypes by
    name (None: those of its record)."""
    recorded = _recorded_dtypes(checkpoint.root) if recorded is None else recorded
    weights = {}
    for weight in found:
        plain = replace(weight, dtype=dtype or recorded_of(recorded, weight.name) or weight.dtype)
        weights[weight.name] = StoredWeight(plain, layout.contents(weight))
    foreign = {}
    for other in layout.foreign(on_disk(checkpoint)):
        entry = replace(other.plain, dtype=dtype or recorded.get(other.plain.name, other.plain.dtype))
        foreign[entry.name] = replace(other, plain=entry)
    return PlainView(checkpoint, layout, weights, *_tensors(checkpoint, layout, weights, foreign), foreign)


def on_disk(checkpoint: Checkpoint) -> OnDisk:
    """Return the parts of a source that layouts read."""
    metadata = {key: text for entries in checkpoint.metadata.values() for key, text in entries.items()}
    return OnDisk(
        checkpoint.tensors,
        checkpoint.config or {},
        checkpoint.producer_config or {},
        metadata,
        lambda info: small_bytes(checkpoint, info),
    )


def values_of(checkpoint: Checkpoint, stored: StoredWeight, backend: Backend) -> Array:
    """Return a dequantized weight in the dtype of `stored.plain`: binary32, or rounded from it once."""
    if stored.weight.adjusting:
        return _adjusted_values(checkpoint, stored, backend)
    values = backend.dequantize(stored.read(checkpoint), stored.weight.dtype)
    return np.ascontiguousarray(np.swapaxes(values, -1, -2)) if stored.weight.axis == COLUMN else values


def _adjusted_values(checkpoint: Checkpoint, stored: StoredWeight, backend: Backend) -> Array:
    """Return a dequantized weight with what tensors next to its codes change."""
    own = [content for content in stored.contents if content.holds.adjusts]
    arrays = [(content, read(checkpoint, checkpoint.tensors[content.entry.name])) for content in own]
    return adjusted(backend.dequantize(stored.read(checkpoint), "F32"), stored.weight.dtype, arrays)


def without_quantization(config: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration without quantization settings, nested ones included."""
    return {
        key: without_quantization(part) if isinstance(part, Mapping) else part
        for key, part in config.items()
        if not _is_quantization(key, part)
    }


def quantized_settings(config: Mapping[str, object], where: str = "") -> Iterator[str]:
    """Yield the paths of the quantization settings in a configuration."""
    for key, part in config.items():
        if _is_quantization(key, part):
            yield f"{where}{key}"
        elif isinstance(part, Mapping):
            yield from quantized_settings(part, f"{where}{key}.")


def _is_quantization(key: str, value: object) -> bool:
    """Return whether a key of a configuration has settings of codes: those of MLX and Mistral are named by what is in
    them."""
    return key in QUANTIZATION_KEYS or (
        key == "quantization" and isinstance(value, Mapping) and not value.keys().isdisjoint(_OTHER_SETTINGS)
    )


_OTHER_SETTINGS = frozenset({"bits", "group_size", "qformat_weight", "qscheme_act"})


def _stale_note(checkpoint: Checkpoint) -> str | None:
    """Return a note on the settings of the source's codes, but for the configuration's own, which an output
    replaces; None without any."""
    paths = [path for path in quantized_settings(checkpoint.config or {}) if path != QUANTIZATION_KEYS[0]]
    stale = [f"{printable(path)} of {CONFIG}" for path in paths]
    keys = {key for entries in checkpoint.metadata.values() for key in entries.keys() & STALE_METADATA}
    stale += [f"{key} of __metadata__" for key in sorted(keys)]
    return f"Settings of the source's codes, which an output does not keep: {', '.join(stale)}." if stale else None


def reading_layout(checkpoint: Checkpoint) -> Layout:
    """Return the layout that reads a source. Raises RefusedError for a plain source and for a layout that cannot be
    read back, InputError if a required configuration is missing."""
    found = layout_of_dialect(checkpoint.dialect)
    if found is not None:
        if found.needs_config and not (on_disk(checkpoint).settings or checkpoint.producer_config):
            raise InputError(
                f"{printable(checkpoint.where)}: holds quantized weights ({checkpoint.dialect}) without a config.json "
                "whose quantization_config describes them: put the checkpoint's own next to it."
            )
        return found
    if checkpoint.dialect is None:
        raise RefusedError(f"{printable(checkpoint.root)}: not quantized; there is nothing to dequantize.")
    if checkpoint.dialect == UNSCALED:
        raise RefusedError(
            f"{printable(checkpoint.root)}: FP8 weights without scales: plain casts, or their scales are missing. If "
            "they are casts, use mxcli dequantize --unscaled."
        )
    method = on_disk(checkpoint).settings.get("quant_method")
    stated = f" (the quant_method in config.json is '{printable(method)}')" if isinstance(method, str) else ""
    raise RefusedError(
        f"{printable(checkpoint.root)}: quantized by {printable(checkpoint.dialect)}{stated}; only "
        f"{', '.join(LAYOUTS)} are read back."
    )


def _recorded_dtypes(folder: Path) -> dict[str, str]:
    """Return the dtype of each plain tensor in the record of an output of mxcli. Raises InputError for a record that
    mxcli did not write."""
    record = read_record(folder)
    return {} if record is None else {name: str(each["dtype"]) for name, each in record.tensors.items()}


def _tensors(
    checkpoint: Checkpoint,
    layout: Layout,
    weights: Mapping[str, StoredWeight],
    foreign: Mapping[str, ForeignWeight],
) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """Return all plain tensors in the order of the source, each weight at the place of its codes, and the names of the
    unused ones."""
    first = {stored.contents[0].entry.name: stored.plain for stored in weights.values()}
    first |= {name: weight.plain for name, weight in foreign.items()}
    consumed = {content.entry.name for stored in weights.values() for content in stored.contents}
    described = {name.removesuffix(".weight") + ending for name in weights for ending in OMITTED_ENDINGS}
    described |= layout.markers(on_disk(checkpoint))
    plain: dict[str, TensorInfo] = {}
    unused: list[str] = []
    for name, info in checkpoint.tensors.items():
        if name in first:
            entry = first[name]
            role = role_of(entry.name, entry.shape, entry.dtype)
            plain[entry.name] = TensorInfo(
                entry.name, entry.dtype, entry.shape, role, info.file, IN_MEMORY, entry.nbytes
            )
        elif name in described:
            unused.append(name)
        elif name not in consumed:
            plain[name] = info
    return with_roles(checkpoint.model.with_roles(plain), checkpoint.captures), tuple(unused)


def omission_notes(view: PlainView) -> Sequence[str]:
    """Return notes on the tensors of the source that are omitted, and on transforms that its weights contain."""
    note = view.layout.transforms(on_disk(view.source)).note
    notes = [] if note is None else [note]
    for what, names in kinds_omitted(view.unused).items():
        notes.append(omitted_note(what, names))
    stale = _stale_note(view.source)
    return notes if stale is None else [*notes, stale]
