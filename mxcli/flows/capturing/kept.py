"""What earlier runs left where captures go: the steps that are kept, and what goes or stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mxcli.errors import InputError, RefusedError, printable
from mxcli.files.capture_writer import StepName, described, step_files, step_of
from mxcli.flows.capturing.budget import StepsThere
from mxcli.flows.capturing.recorder import listed


@dataclass(frozen=True, slots=True)
class KeptStep:
    """A step whose file an earlier run left: its loss, in nats per token, and its bytes."""

    loss: float | None
    nbytes: int


def kept_steps(folder: Path, run: Mapping[str, object], *, force: bool) -> dict[int, KeptStep]:
    """The steps whose files this run made.

    Raises RefusedError where another run made one, of any step, which would lie beside ours; with `force` such files
    are not kept.
    """
    found: dict[int, KeptStep] = {}
    for name in step_files(folder):
        path = folder / name
        step = own_step(name)
        try:
            told = described(path)
            _check_run(path, None if step is None else told.get("run"), run)
        except (InputError, RefusedError):
            if force:
                continue
            raise
        assert step is not None
        loss = told.get("loss")
        value = loss.get("value") if isinstance(loss, dict) else None
        found[step] = KeptStep(value if isinstance(value, float) else None, path.stat().st_size)
    return found


def own_step(name: str) -> int | None:
    """The step whose file this command gives that name; None for one that it never gives, such as a rank's."""
    step = step_of(name)
    return step if str(StepName(step)) == name else None


def on_disk(folder: Path, files: Mapping[int, str], kept: Mapping[int, KeptStep]) -> StepsThere:
    """What counts as written: steps that are kept, and files that are replaced one by one, but for the last of them.
    `files` are those of the steps to record that exist, in the order of steps."""
    replaced = [
        (folder / name).lstat().st_size
        for step, name in files.items()
        if step not in kept and (folder / name).is_file()
    ]
    return StepsThere(len(kept), sum(step.nbytes for step in kept.values()), replaced=sum(replaced[:-1]))


def others_note(folder: Path, earlier: Sequence[str]) -> str | None:
    """What to say of files that this command neither replaces nor removes."""
    others = [name for name in earlier if own_step(name) is None]
    if not others:
        return None
    return f"{printable(folder)} holds captures that this command does not make, and that stay: {listed(others)}."


def _check_run(path: Path, before: object, run: Mapping[str, object]) -> None:
    """Raises RefusedError for a file that is not of this run, with what is different."""
    if not isinstance(before, dict):
        raise RefusedError(
            f"{printable(path)}: cannot be resumed: no run of this command made it; move it away, or --force its "
            "replacement."
        )
    changes = [
        f"{key} was {printable(before.get(key))} and is {printable(value)}"
        for key, value in run.items()
        if before.get(key) != value
    ]
    if changes:
        raise RefusedError(
            f"{printable(path)}: cannot be resumed: {'; '.join(changes)}. Give the same options, --force to replace "
            "what is there, or another -o/--output."
        )
