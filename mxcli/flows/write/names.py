"""The names of an output's weight files and of its index: those of the source, as safetensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mxcli.files.checkpoint import Checkpoint
from mxcli.files.directory import INDEX_NAME, SAFETENSORS, SHARD_NAME, SOLE

_ENDING = f".{SAFETENSORS}"
_WHOLE = re.compile(r"(model|diffusion_pytorch_model|open_clip_model|adapter_model)(\.[a-z]\w*)?")
"""What loaders call the weights of a model, and a variant of them."""


@dataclass(frozen=True, slots=True)
class ModelName:
    """The name that a model's files have in common, and the variant (`.fp16`; "": none)."""

    stem: str = "model"
    variant: str = ""

    @property
    def index(self) -> str:
        """The name of its index."""
        return f"{self.stem}{_ENDING}.index{self.variant}.json"

    def files(self, count: int) -> list[str]:
        """Return the names of that many weight files, numbered if there are several."""
        whole = f"{self.stem}{self.variant}"
        if count == 1:
            return [whole + _ENDING]
        return [f"{whole}-{place:05}-of-{count:05}{_ENDING}" for place in range(1, count + 1)]


def model_name(checkpoint: Checkpoint) -> ModelName:
    """Return what the files of a source are called: by its index, else by all of its files if they agree."""
    if checkpoint.index is not None:
        match = INDEX_NAME.fullmatch(_renamed(checkpoint.index.name))
        return ModelName() if match is None else ModelName(match[1], f".{match[3]}" if match[3] else "")
    stems = {_family(_as_safetensors(file.name)) for file in checkpoint.files}
    whole = _WHOLE.fullmatch(stems.pop()) if len(stems) == 1 else None
    return ModelName() if whole is None else ModelName(whole[1], whole[2] or "")


def names_of(checkpoint: Checkpoint, files: Sequence[Path]) -> list[str]:
    """Return the names of the source's files as safetensors files, in the folders where they are. A file that is the
    whole model gets a name by which loaders find it."""
    if len(files) == 1 and checkpoint.index is None and not SHARD_NAME.fullmatch(files[0].name):
        return model_name(checkpoint).files(1) if len(checkpoint.files) == 1 else [SOLE[SAFETENSORS]]
    names = [
        PurePosixPath(place_of(checkpoint, file)).with_name(_as_safetensors(file.name)).as_posix() for file in files
    ]
    return names if len(set(names)) == len(names) else model_name(checkpoint).files(len(files))


def is_whole(name: str) -> bool:
    """Return whether loaders find a model in a file of this name without an index."""
    return name in SOLE.values() or (
        name.endswith(_ENDING) and _WHOLE.fullmatch(name.removesuffix(_ENDING)) is not None
    )


def _family(name: str) -> str:
    """Return the name of a file without its ending and number."""
    shard = SHARD_NAME.fullmatch(name)
    return shard[1] if shard else name.removesuffix(_ENDING)


def place_of(checkpoint: Checkpoint, file: Path) -> str:
    """Return the name of a file of a checkpoint in its folder, with the folders in between."""
    return file.relative_to(checkpoint.root).as_posix() if file.is_relative_to(checkpoint.root) else file.name


def _renamed(name: str) -> str:
    """Return a name of PyTorch weights as loaders call them as safetensors."""
    return re.sub(r"^(open_clip_)?pytorch_model(?=[.-])", r"\1model", name)


def _as_safetensors(name: str) -> str:
    return PurePosixPath(_renamed(name)).stem + _ENDING
