"""The size of what a pickle builds, computed from its opcodes before it is loaded: a short one can stand for very much.

A tuple that holds another twice, which holds another twice, …, is hashed and walked in full, each time; the pickle of
one takes three bytes per doubling. Only calls that the pickles of tensors make are allowed to.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mxcli.errors import printable

MOST_OPCODES = 20_000_000
MOST_WEIGHT = 20_000_000
MOST_NESTING = 200
PICKLES_OF_LEGACY = 5
"""The pickles of a file that is not a zip archive: magic number, version, system, the object, and its storage keys."""
ENCODE, ENCODING = "_codecs encode", "latin1"
"""How bytes are pickled."""
_CALLS, _MARK = frozenset({"REDUCE", "NEWOBJ"}), "MARK"
_FILLS = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})
_ALLOCATES = (("torch", "Tensor"), ("torch.", "Tensor"), ("torch", "Storage"), ("torch.", "Storage"))


@dataclass(frozen=True, slots=True)
class _Built:
    """An object on the stack: how many objects it is when walked in full, how deep they nest, its text or the name of
    its global, and the parts of a short tuple."""

    weight: int = 1
    depth: int = 0
    text: str | None = None
    parts: tuple[_Built, ...] = ()


def check_pickles(path: Path, *, zipped: bool) -> None:
    """Raise ValueError, as a sentence without its end, if a pickle of a PyTorch file is damaged, or builds more than a
    state dict does."""
    if not zipped:
        with path.open("rb") as file:
            for _ in range(PICKLES_OF_LEGACY):
                _check(file)
        return
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.filename.endswith("/data.pkl"):
                with archive.open(member) as stream:
                    _check(stream)


def _check(stream: IO[bytes]) -> None:
    """Run one pickle with sizes in the place of objects."""
    stack: list[_Built | None] = []
    memo: dict[object, _Built] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        if count > MOST_OPCODES:
            raise ValueError(f"its pickle has more than {MOST_OPCODES:,} instructions; save a plain state_dict")
        name = opcode.name
        if name == _MARK:
            stack.append(None)
        elif "PUT" in name or name == "MEMOIZE":
            top = stack[-1] if stack else None
            memo[len(memo) if name == "MEMOIZE" else argument] = top or _Built()
        elif "GET" in name:
            stack.append(memo.get(argument, _Built()))
        elif opcode.stack_before or opcode.stack_after:
            popped = list(_popped(stack, opcode))
            if name in _CALLS:
                _check_call(popped)
            stack += [_built(name, argument, popped)] * len(opcode.stack_after)


def _popped(stack: list[_Built | None], opcode: Any) -> Iterator[_Built]:
    """Remove what an opcode takes from the stack, and yield it from top to bottom."""
    takes = len(opcode.stack_before)
    if pickletools.markobject in opcode.stack_before:
        takes = opcode.stack_before.index(pickletools.markobject)
        while stack and (top := stack.pop()) is not None:
            yield top
    for _ in range(takes):
        if stack:
            yield stack.pop() or _Built()


def _built(name: str, argument: object, popped: list[_Built]) -> _Built:
    """Return what an opcode leaves. Raises ValueError beyond the limits."""
    weight = 1 + sum(part.weight for part in popped)
    inside, container = (popped[:-1], popped[-1:]) if name in _FILLS else (popped, [])
    depth = max([0, *(part.depth + 1 for part in inside), *(part.depth for part in container)])
    if weight > MOST_WEIGHT:
        raise ValueError(f"its pickle holds more than {MOST_WEIGHT:,} objects, shared ones each time counted")
    if depth > MOST_NESTING:
        raise ValueError(f"its pickle nests more than {MOST_NESTING} deep; save a plain state_dict")
    text = argument if isinstance(argument, str) else None
    return _Built(weight, depth, text, tuple(reversed(popped)) if name.startswith("TUPLE") and len(popped) < 4 else ())


def _check_call(popped: list[_Built]) -> None:
    """Raise ValueError for a call that only fills memory: pickles of tensors take them from storages in the file."""
    if len(popped) < 2:
        return
    arguments, called = popped[0], popped[1].text or ""
    module, _, name = called.partition(" ")
    if called == ENCODE and (len(arguments.parts) < 2 or arguments.parts[1].text not in (ENCODING, "latin-1")):
        raise ValueError(f"its pickle calls {printable(called)} for something other than bytes")
    allocates = name == "bytearray" and not (arguments.parts and arguments.parts[0].parts) and arguments.weight > 1
    if allocates or any(module.startswith(start) and name.endswith(end) for start, end in _ALLOCATES):
        raise ValueError(f"its pickle calls {printable(called.replace(' ', '.'))}; save the state_dict alone")
