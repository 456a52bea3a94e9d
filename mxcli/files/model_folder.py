"""The files of a model's folder next to its weights: which an output carries along, and why the others stay behind."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mxcli.errors import InputError, printable
from mxcli.files.model_files import CONFIG, PRODUCER_CONFIG, RECORD
from mxcli.files.safetensors import read_safetensors
from mxcli.files.tensors import FileContents, TensorInfo
from mxcli.files.trainers.formats import is_state

CACHES = ("models--", "datasets--")
"""How the folders of a download cache begin, in which the files of a model are links to others of the same folder."""
WEIGHTS = re.compile(
    r"\.(safetensors|bin|pt|pth|ckpt|pkl|pickle|npy|npz|gguf|ggml|onnx|onnx[._]data|h5|msgpack|ot|tflite|mlmodel|jit|"
    r"engine|plan|nemo|distcp)$"
)
"""The endings of files that usually hold weights."""
INDEX_NAME = re.compile(r"\.index(\.\w+)?\.json$")
OLD_SETTINGS = "an old quantization config"
_HIDDEN, _COMPILED, _UNFINISHED_RUN = "hidden", "compiled code", "left by an unfinished run"
_EARLIER, _OTHER_INDEX = "the record of an earlier output", "an index of other weights"
_QUIET = frozenset({_HIDDEN, _COMPILED, _UNFINISHED_RUN, _EARLIER, _OTHER_INDEX})
"""Reasons that need no note of their own."""
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Folder:
    """A model's folder as it is read: its weight files, and names and shapes of the tensors in them."""

    root: Path
    used: frozenset[Path]
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def repeats(self, path: Path) -> bool:
        """Return whether a file holds nothing but tensors that are read from the others; False if that is not known."""
        if path.suffix != ".safetensors" or not self.tensors:
            return False
        try:
            found = {info.name: info.shape for info in read_safetensors(path).tensors}
        except (InputError, OSError):
            return False
        return bool(found) and found.items() <= self.tensors.items()

    def may_repeat(self, path: Path) -> bool:
        """Return whether a file with the name of a whole model may be one: it holds no other tensors, or which they are
        is not known."""
        return path.suffix != ".safetensors" or not self.tensors or self.repeats(path)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Files that an output does not carry along: a pattern searched in their paths (those of folders end with `/`),
    why, and a further condition."""

    reason: str
    pattern: str
    when: Callable[[Folder, Path], bool] = lambda folder, path: True


def _next_to_safetensors(folder: Folder, path: Path) -> bool:
    """Return whether a PyTorch file is next to safetensors files, which loaders take first."""
    near = [used for used in folder.used if used.parent == path.parent] or list(path.parent.iterdir())
    return any(other.suffix == ".safetensors" for other in near)


_OF_MODEL = r"(pytorch_model|model|diffusion_pytorch_model)(\.[a-z]\w*)?(-\d+-of-\d+)?(\.[a-z]\w*)?"
"""How loaders call the weights of a whole model, with a variant and the number of a shard."""
_PICKLED = r"(bin|pt|pth|ckpt|pkl)"
_STATE = "training state"
OTHER_FORMAT, COPY = "the model in another format", "another copy of the weights"
_MAKERS = "the same model under its maker's own names"
LEFT_OUT = (
    LeftOut(_HIDDEN, r"(^|/)\.[^/]+/?$"),
    LeftOut(_COMPILED, r"(^|/)__pycache__/$|\.pyc$"),
    LeftOut(_UNFINISHED_RUN, r"\.partial$"),
    LeftOut("unfinished", r"\.(incomplete|lock|tmp|aria2)$"),
    LeftOut(_EARLIER, rf"^{re.escape(RECORD)}$"),
    LeftOut(
        OLD_SETTINGS,
        rf"(^|/)({re.escape(PRODUCER_CONFIG)}|quant_config\.json|quantize_config\.json|quantization_config\.json|"
        r"quantization_map\.json|quanto_qmap\.json|recipe\.ya?ml)$",
    ),
    LeftOut(_STATE, r"[^/]$", lambda folder, path: is_state(path.name)),
    LeftOut(
        _STATE,
        r"(^|/)(checkpoint-\d+|global_step\d+|optimizer_\d+|pytorch_model_fsdp_\d+|wandb)/$|"
        r"(^|/)(trainer_state\.json|events\.out\.tfevents[^/]*|zero_pp_rank[^/]*|[^/]*optim_states\.pt)$",
    ),
    LeftOut(OTHER_FORMAT, r"(^|/)(onnx|openvino|coreml|tflite|flax|tf|gguf|mlx|[^/]*\.ml(package|modelc))/$"),
    LeftOut(OTHER_FORMAT, r"\.(h5|msgpack|ot|tflite|mlmodel|ggml|llamafile|jit)$|\.ckpt\.(index|meta|data-[^/]*)$"),
    LeftOut(OTHER_FORMAT, r"(^|/)(?!mmproj)[^/]*\.gguf$"),
    LeftOut(
        OTHER_FORMAT,
        r"(^|/)([a-z]+_)*model(_[a-z0-9]+)*\.onnx([._]data)?$|(^|/)openvino_[^/]*\.(xml|bin)$",
    ),
    LeftOut(_MAKERS, rf"^(original|metal)/.*{WEIGHTS.pattern}"),
    LeftOut(
        _MAKERS,
        r"^consolidated[^/]*\.(safetensors|pth|pt)$|^consolidated[^/]*\.index\.json$|^params\.json$",
    ),
    LeftOut(COPY, r"(^|/)pytorch_model[^/]*\.(bin|bin\.index(\.\w+)?\.json)$", _next_to_safetensors),
    LeftOut(COPY, rf"^{_OF_MODEL}\.{_PICKLED}$"),
    LeftOut(COPY, rf"^{_OF_MODEL}\.safetensors$", Folder.may_repeat),
    LeftOut(COPY, r"^[^/]+\.safetensors$", Folder.repeats),
    LeftOut(_OTHER_INDEX, rf"^[^/]*{INDEX_NAME.pattern}"),
)
"""The first row that fits decides. All others are carried: a loader may need them."""


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A file of a model's folder that is not read as weights, or a folder of which nothing is carried: why it is left
    out (None: it is carried), and where it leads if that is the reason."""

    path: Path
    reason: str | None = None
    target: str = ""


def folder_entries(root: Path, used: Collection[Path], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[FolderEntry]:
    """Yield every file of a model's folder but config.json and the weights that are `used`, whose tensors have these
    `shapes`, sorted by folder.

    A folder that is left out as a whole, or cannot be listed, is one entry; the latter come last.
    """
    known = Folder(root, frozenset(used), shapes)
    refused: list[FolderEntry] = []

    def unreadable(error: OSError) -> None:
        refused.append(FolderEntry(Path(error.filename), f"cannot be listed ({error.strerror})"))

    for folder, folders, names in os.walk(root, onerror=unreadable):
        kept = []
        for path in (Path(folder, name) for name in sorted(folders)):
            entry = _decided(known, path, is_folder=True)
            if entry.reason is None:
                kept.append(path.name)
            else:
                yield entry
        folders[:] = kept
        for path in (Path(folder, name) for name in sorted(names)):
            if path not in used and path != root / CONFIG:
                yield _decided(known, path, is_folder=False)
    yield from refused


def _decided(folder: Folder, path: Path, *, is_folder: bool) -> FolderEntry:
    """Return what is done with a file, or with a folder as a whole."""
    name = path.relative_to(folder.root).as_posix() + "/" * is_folder
    row = next((row for row in LEFT_OUT if re.search(row.pattern, name) and row.when(folder, path)), None)
    if row is not None:
        return FolderEntry(path, row.reason)
    if is_folder:
        return FolderEntry(path, "links to directories", os.readlink(path)) if path.is_symlink() else FolderEntry(path)
    if path.is_symlink() and not _stays(path, folder.root):
        return FolderEntry(path, "links out of the source", os.readlink(path))
    return FolderEntry(path) if path.is_file() else FolderEntry(path, "not a regular file")


def side_files(root: Path, used: Mapping[Path, FileContents]) -> tuple[tuple[Path, ...], dict[str, list[str]]]:
    """Return the files next to the weights that an output carries along, sorted, and those that are left out, by the
    reason.

    config.json is not listed, because an output gets its own.
    """
    carried: list[Path] = []
    left_out: dict[str, list[str]] = {}
    shapes = {info.name: info.shape for contents in used.values() for info in contents.tensors}
    for entry in folder_entries(root, used, shapes):
        if entry.reason is None:
            carried.append(entry.path)
        else:
            more = f" -> {entry.target}" if entry.target else ""
            left_out.setdefault(entry.reason, []).append(f"{entry.path.relative_to(root)}{more}")
    return tuple(sorted(carried)), left_out


def carried_tensors(root: Path, side_files: Iterable[Path]) -> list[TensorInfo]:
    """Return the tensors of the safetensors files that an output carries along next to its own: they stay plain, and
    loaders may read them with the model (multi-token prediction)."""
    found: list[TensorInfo] = []
    for path in side_files:
        if path.parent == root and path.suffix == ".safetensors":
            with suppress(InputError, OSError):
                found += read_safetensors(path).tensors
    return found


def left_out_notes(left_out: Mapping[str, Sequence[str]], written: Iterable[str] = ()) -> list[str]:
    """Return a note per reason on files that an output does not carry along, but for those that are `written` and those
    that no output has."""
    own = set(written)
    noted = {reason: names for reason, names in sorted(left_out.items()) if reason not in _QUIET}
    others = {reason: [name for name in names if name not in own] for reason, names in noted.items()}
    return [f"Not carried to an output, {reason}: {_listed(names)}." for reason, names in others.items() if names]


def _stays(link: Path, root: Path) -> bool:
    """Return whether a link leads nowhere else than into the source, or into the download cache that the source is part
    of."""
    try:
        target, home = link.resolve(), root.resolve()
    except (OSError, RuntimeError):  # by the version of Python: it leads back to itself
        return True
    caches = (path for path in home.parents if path.name.startswith(CACHES))
    return any(target.is_relative_to(place) for place in (home, *caches))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(map(printable, names[:_SHOWN])) + more
