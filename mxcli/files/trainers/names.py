"""Names that wrappers and trainers give to the tensors of a model, and the names that it has by itself."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mxcli.errors import InputError, printable, together
from mxcli.files.captures import CAPTURE_KEY
from mxcli.files.roles import role_of
from mxcli.files.tensors import IN_MEMORY, Array, FileContents, LeftOut, TensorInfo
from mxcli.files.trainers.adapters import PARTS_OF_ADAPTERS
from mxcli.files.trainers.parts import AVERAGED, COPY


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A segment that a wrapper adds to names, and the wrapper; `leading` if only at the beginning of all names."""

    segment: str
    by: str
    leading: bool = False


WRAPPERS = (
    Wrapper("_orig_mod", "torch.compile"),
    Wrapper("_fsdp_wrapped_module", "FSDP"),
    Wrapper("_fpw_module", "fairscale's FSDP"),
    Wrapper("_checkpoint_wrapped_module", "activation checkpointing"),
    Wrapper("_forward_module", "Lightning Fabric"),
    Wrapper("_module", "Opacus", leading=True),
    Wrapper("module", "DistributedDataParallel or AveragedModel", leading=True),
)
_ANYWHERE = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(row.segment for row in WRAPPERS if not row.leading)})\.")
ATTRIBUTES = frozenset({"model", "net", "network", "module", "llm", "lm", "_model", "hf_model", "base_model"})
"""Names that trainers hold a model by; a model's own names may begin with them too."""
KNOWN = re.compile(
    r"model\.(layers|embed_tokens|decoder|encoder|language_model|visual|vision_tower|embeddings)\."
    r"|transformer\.(h|wte|word_embeddings)\.|gpt_neox\.(layers|embed_in)\.|backbone\.(layers|embeddings?)\."
    r"|(bert|roberta|distilbert|electra|deberta|albert|xlm_roberta|vit|dinov2)\.(embeddings|encoder|transformer)\."
    r"|language_model\.model\.|(encoder|decoder)\.block\.\d"
)
"""How names of well-known models begin."""

EXTRA_STATE = re.compile(r"(^|\.)_extra_state(\.|$)")
UNMERGED = re.compile(r"base_model\.model\..*\.(base_layer|modules_to_save|original_module)\.")
"""Names of a model that PEFT has wrapped."""
OF_PEFT = "base_model.model."
AVERAGES = "n_averaged"
"""The counter that PyTorch's AveragedModel stores next to its `module`."""
FLATTENED = re.compile(r"(^|[._])flat_param(_\d+)?$")
_OPTIMIZER = re.compile(r"(optimizers?|optim|opt)(_states?|_state_dicts?)?\.", re.IGNORECASE)
_MOMENT = re.compile(
    r"(^|\.)(exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|square_avg|acc_delta|sum|step|state[12]|qmap[12]|absmax[12])"
    r"$"
)
_NOTABLE = re.compile(
    rf"{_ANYWHERE.pattern}|{EXTRA_STATE.pattern}|{FLATTENED.pattern}|^_?module\.|^base_model\.|^opt|^[^.]*(ema|swa|aver|shadow)",
    re.IGNORECASE,
)
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")
OF_OPTIMIZER = "optimizer state"
OF_ENGINE = "state of Transformer Engine's FP8 recipe"


def own_name(name: str) -> str:
    """Return a name without the segments that wrappers add anywhere."""
    return _ANYWHERE.sub("", name)


def may_be_left_out(name: str) -> bool:
    """Return whether a tensor of that name may belong to an optimizer or a copy of the model."""
    return bool(_OPTIMIZER.match(name) or AVERAGED.fullmatch(name.partition(".")[0]))


def own_names(names: Iterable[str], *, trained: bool = False) -> tuple[dict[str, str], list[str]]:
    """Return, for each name, the one that the model gives, and sentences without their end on what was stripped. With
    `trained` they are of a training checkpoint: a model's attribute in its trainer is stripped too, but only if names
    of a well-known model are left that were not there before."""
    new = {name: own_name(name) for name in names}
    notes = [
        f"'{row.segment}' ({row.by}) is stripped from {count:,} of {len(new):,} names"
        for row in WRAPPERS
        if not row.leading and (count := sum(row.segment in name.split(".")[:-1] for name in new))
    ]
    leading = [row for row in WRAPPERS if row.leading]
    while new and (row := next((row for row in leading if _all_begin(new, row.segment)), None)):
        new = {name: short.removeprefix(f"{row.segment}.") for name, short in new.items()}
        notes.append(f"'{row.segment}' ({row.by}) is stripped from all names")
    attributes = {short.partition(".")[0] for short in new.values()} if trained else set[str]()
    if len(attributes) == 1 and _all_begin(new, attribute := attributes.pop()):
        shorter = {name: short.removeprefix(f"{attribute}.") for name, short in new.items()}
        if _is_known(new):
            pass
        elif attribute in ATTRIBUTES and _is_known(shorter):
            new = shorter
            notes.append(f"'{attribute}' (the trainer's name of the model) is stripped from all names")
        elif attribute in ATTRIBUTES:
            notes.append(
                f"all names begin with '{attribute}', which is kept: it may be the model's own or the trainer's"
            )
    return new, notes


def _all_begin(new: Mapping[str, str], segment: str) -> bool:
    return all(short.startswith(f"{segment}.") for short in new.values())


def _is_known(new: Mapping[str, str]) -> bool:
    return any(map(KNOWN.match, new.values()))


def as_model(contents: FileContents, path: Path, *, trained: bool = False) -> FileContents:
    """Return the contents of a file under the names that its model gives, without what is not part of the model:
    optimizer state and averaged copies stored among its tensors, and Transformer Engine's `_extra_state`. Captures and
    quantized files are left as they are: loaders find their tensors by these names.

    Raises InputError for parameters that FSDP flattened, and if two different tensors get one name.
    """
    names = [info.name for info in contents.tensors]
    if not trained and (_is_final(contents) or not _are_notable(names)):
        return contents
    shown = printable(path)
    flat = [name for name in names if FLATTENED.search(name)]
    if flat:
        raise InputError(
            f"{shown}: '{printable(flat[0])}' holds parameters flattened by FSDP, whose shapes are not in the file; "
            "save it with a full state dict (StateDictOptions(full_state_dict=True))."
        )
    left = _left_out(contents.tensors)
    if len(left) == len(names) > 0:
        listed = ", ".join(map(str, _parts(contents.tensors, left)))
        raise InputError(f"{shown}: holds no model, only {listed}.")
    trained = trained or any(what == OF_OPTIMIZER for _, what in left.values())
    new, stripped = own_names((name for name in names if name not in left), trained=trained)
    _refuse_unmerged(new.values(), shown)
    kept = _without_repeated(contents, new, path)
    parts = _parts(contents.tensors, left)
    notes = [f"{shown}: left out: {'; '.join(map(str, parts))}."] if left else []
    notes += [f"{shown}: {sentence}." for sentence in stripped]
    decode = contents.decode
    old = {new[info.name]: info.name for info in kept}

    def decode_renamed(info: TensorInfo) -> Array:
        assert decode is not None
        return decode(replace(info, name=old[info.name]))

    tied = {new[alias]: new[stored] for alias, stored in contents.tied.items() if alias in new and stored in new}
    return replace(
        contents,
        tensors=tuple(_renamed(info, new[info.name]) for info in kept),
        notes=(*contents.notes, *notes),
        tied={alias: stored for alias, stored in tied.items() if alias != stored},
        decode=decode_renamed if decode else None,
        left_out=(*contents.left_out, *parts),
    )


def _are_notable(names: Iterable[str]) -> bool:
    """Return whether a wrapper or an optimizer is in some name; equal layers and experts share one look-up."""
    return any(map(_NOTABLE.search, {_NUMBERS.sub("0", name) for name in names}))


def _refuse_unmerged(names: Collection[str], shown: str) -> None:
    """Raise InputError for a model that PEFT has wrapped, and for an adapter with whole tensors."""
    unmerged = next((name for name in names if UNMERGED.match(name)), None)
    if unmerged is not None:
        raise InputError(
            f"{shown}: '{printable(unmerged)}' is of a model that PEFT has wrapped, with an adapter next to it; "
            "save what merge_and_unload() returns."
        )
    if not all(name.startswith(OF_PEFT) for name in names):
        return
    whole = [name for name in names if role_of(name, (1, 1), "BF16") not in PARTS_OF_ADAPTERS]
    if whole and len(whole) < len(names):
        raise InputError(
            f"{shown}: '{printable(whole[0])}' is stored whole next to the LoRA matrices of a PEFT adapter; merge "
            "them into the base model first: "
            "PeftModel.from_pretrained(base, FOLDER).merge_and_unload().save_pretrained(OUT)."
        )


def _is_final(contents: FileContents) -> bool:
    return CAPTURE_KEY in contents.metadata or any(info.role == "codes" for info in contents.tensors)


def _renamed(info: TensorInfo, name: str) -> TensorInfo:
    return info if name == info.name else replace(info, name=name, role=role_of(name, info.shape, info.dtype))


def _left_out(tensors: Iterable[TensorInfo]) -> dict[str, tuple[str, str]]:
    """Return what is not part of a model, by name: the part that it belongs to, and what that is."""
    infos = list(tensors)
    left = {info.name: ("_extra_state", OF_ENGINE) for info in infos if EXTRA_STATE.search(info.name)}
    if all(info.name.startswith("module.") for info in infos if info.name != AVERAGES):
        left |= {info.name: (AVERAGES, "counter of AveragedModel") for info in infos if info.name == AVERAGES}
    optimizer = [info.name for info in infos if _OPTIMIZER.match(info.name)]
    if optimizer and all(map(_MOMENT.search, optimizer)):
        left |= {name: (name.partition(".")[0], OF_OPTIMIZER) for name in optimizer}
    first = {info.name: info.name.partition(".")[0] for info in infos if "." in info.name}
    for copy in {segment for segment in first.values() if AVERAGED.fullmatch(segment)}:
        copies = [info for info in infos if first.get(info.name) == copy]
        others = {key for info in infos if first.get(info.name) != copy for key in _keys(info.name, info.shape)}
        if all(not info.shape or others & _keys(info.name.partition(".")[2], info.shape) for info in copies):
            left |= {info.name: (copy, COPY) for info in copies}
    return left


def _keys(name: str, shape: tuple[int, ...]) -> set[tuple[str, tuple[int, ...]]]:
    """Return what a tensor and an averaged copy of it have in common: the shape, and the name without dots, which
    copies may lack, with the name of the model in its trainer or without."""
    own = own_name(name)
    first, _, rest = own.partition(".")
    return {(part.replace(".", ""), shape) for part in (own, rest if first in ATTRIBUTES else own)}


def _parts(tensors: Iterable[TensorInfo], left: Mapping[str, tuple[str, str]]) -> Iterable[LeftOut]:
    parts: dict[tuple[str, str], list[int]] = {}
    for info in tensors:
        if info.name in left:
            parts.setdefault(left[info.name], []).append(info.nbytes)
    return [LeftOut(name, what, len(sizes), sum(sizes)) for (name, what), sizes in parts.items()]


def _without_repeated(contents: FileContents, new: Mapping[str, str], path: Path) -> list[TensorInfo]:
    """Return the tensors to keep, one of those that are the same under the same new name."""
    kept: dict[str, TensorInfo] = {}
    problems = []
    for info in contents.tensors:
        first = kept.setdefault(new[info.name], info) if info.name in new else info
        if first is not info and not _is_same(first, info, contents.tied):
            problems.append(
                f"{printable(path)}: '{printable(first.name)}' and '{printable(info.name)}' differ, and both are "
                f"'{printable(new[info.name])}' in the model; keep one of them."
            )
    if problems:
        raise together(InputError, printable(path), problems)
    return list(kept.values())


def _is_same(one: TensorInfo, other: TensorInfo, tied: Mapping[str, str]) -> bool:
    if tied.get(other.name, other.name) == tied.get(one.name, one.name):
        return True
    in_place = one.offset == other.offset != IN_MEMORY
    return in_place and (one.dtype, one.shape) == (other.dtype, other.shape)
