"""The mutation score of `mxcli verify`: kinds of damage planted in outputs of every layout, and how many it finds.

    python tests/mutations/score.py [--layouts L ...] [--subjects S ...] [--kinds TEXT ...] [--modes M ...]
                                    [--seed N] [--portion P] [--all] [--misses] [--json FILE] [--keep DIR]

Four modes: an output of mxcli alone and against its source, and the same without its record, as of another producer.
A damage is found if verify exits with 3, 4 or 5 and a problem or the error names what was damaged. Required: all
damage in both modes of our own; without the record, against the source all that changes a value by more than rounding,
and alone what a person could see in the files. With --all, the rest is tried without the record too.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if __package__ in (None, ""):
    _TESTS = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(_TESTS), *(str(_TESTS / folder) for folder in ("cli", "flows"))]

import numpy as np

from mutations.damage import DAMAGE
from mutations.kinds import FOLDER, Damage, Harm
from mutations.outputs import RECORD, Output
from mutations.subjects import SUBJECTS, VARIANTS, Subject, called

OWN, OWN_AGAINST, FOREIGN, FOREIGN_AGAINST = MODES = ("own", "own against", "foreign", "foreign against")
FOUND = (3, 4, 5)
SOUND = "undamaged"


@dataclass(frozen=True)
class Tried:
    """One verification of one output: exit code, whether it names what was damaged, and whether it must be found."""

    subject: str
    layout: str
    kind: str
    mode: str
    what: str
    places: tuple[str, ...]
    code: int
    named: bool
    required: bool
    said: str

    @property
    def found(self) -> bool:
        return self.code in FOUND and self.named


def score(
    subjects: Sequence[Subject],
    kinds: Sequence[Damage],
    folder: Path,
    *,
    seed: int = 0,
    modes: Sequence[str] = MODES,
    portion: float = 1.0,
    everything: bool = False,
    keep: bool = False,
    progress: Callable[[str, Sequence[Tried]], object] = lambda line, results: None,
) -> list[Tried]:
    """Plant every kind of damage in every subject, or a random `portion` of the kinds, and verify; the undamaged ones
    too."""
    results: list[Tried] = []
    for subject in subjects:
        place = folder / subject.name
        place.mkdir(parents=True)
        output = subject.build(place, seed)
        output.stored, output.plain  # noqa: B018 - located while it is sound
        choice = np.random.default_rng([seed, zlib.crc32(subject.name.encode())])
        usual: dict[str, frozenset[str]] = {}
        for damage in (None, *(each for each in kinds if choice.random() < portion)):
            kind = SOUND if damage is None else damage.name
            case = place / ("-".join(re.findall(r"\w+", kind)) if keep else "case")
            shutil.copytree(output.folder, case)
            random = np.random.default_rng([seed, zlib.crc32(f"{subject.name} {kind}".encode())])
            harm = Harm((), "nothing") if damage is None else damage.apply(output.copied(case), random)
            if damage is not None and harm is not None and _same(output.folder, case):
                raise AssertionError(f"{subject.name}: '{kind}' changed nothing: {harm.what}")
            if harm is not None:
                results += _tried(
                    subject, output, kind, harm, case, list(_modes(damage, harm, modes, everything)), usual
                )
            if harm is None or not keep:
                shutil.rmtree(case)
        progress(f"{subject.name}: {len(results):,} verified, {len(missed(results)):,} missed", results)
        if not keep:
            shutil.rmtree(place)
    return results


def _tried(
    subject: Subject,
    output: Output,
    kind: str,
    harm: Harm,
    folder: Path,
    modes: Sequence[tuple[str, bool]],
    usual: dict[str, frozenset[str]],
) -> Iterator[Tried]:
    """Yield the verifications of a folder, first with its record; without it, it is another producer's.

    What verify says of the undamaged output in a mode is kept in `usual`: to say it again finds nothing.
    """
    for mode, required in modes:
        if mode in (FOREIGN, FOREIGN_AGAINST):
            (folder / RECORD).unlink(missing_ok=True)
        code, texts = _verify(output, folder, mode)
        if kind == SOUND:
            usual[mode] = frozenset(texts)
        new = [text for text in texts if text not in usual.get(mode, ())]
        named = any(names(text, name) for place in harm.places for name in place for text in new)
        said = next(iter(new or texts), "")[:300]
        places = tuple(place[0] for place in harm.places[:4])
        yield Tried(subject.name, subject.layout, kind, mode, harm.what, places, code, named, required, said)


def _modes(damage: Damage | None, harm: Harm, modes: Sequence[str], everything: bool) -> Iterator[tuple[str, bool]]:
    """Yield the modes to try, ours first, and whether the damage must be found in each."""
    required = {OWN: True, OWN_AGAINST: True, FOREIGN: True, FOREIGN_AGAINST: True}
    if damage is not None:
        required[FOREIGN] = damage.seen if harm.seen is None else harm.seen
        required[FOREIGN_AGAINST] = damage.values if harm.values is None else harm.values
    for mode in MODES:
        absent = damage is not None and damage.record and mode in (FOREIGN, FOREIGN_AGAINST)
        if mode in modes and not absent and (required[mode] or everything):
            yield mode, required[mode]


def _verify(output: Output, folder: Path, mode: str) -> tuple[int, list[str]]:
    """Return the exit code of verify, and each problem and error as a text."""
    against = ["--against", output.source] if mode in (OWN_AGAINST, FOREIGN_AGAINST) else []
    code, out, said = called("verify", folder, *against, "--json", "--device", "cpu", "--threads", "1")
    texts = [*_problems(out), *(line for line in said.splitlines() if line.startswith("error:"))]
    return code, [text.replace(str(folder), FOLDER) for text in texts]


def _problems(out: str) -> list[str]:
    """Return each problem as one text."""
    try:
        findings = json.loads(out).get("findings", [])
    except ValueError:
        return []
    return [
        " ".join(str(value) for value in finding.values() if isinstance(value, str))
        for finding in findings
        if finding.get("severity") == "problem"
    ]


def names(text: str, name: str) -> bool:
    """Return whether a text has a name: alone, in two parts (`LAYER lacks PART`), or in a set (`PARENT.PART+PART`)."""
    if _has(text, name):
        return True
    splits = ((name[: found.end() - 1], name[found.end() :]) for found in re.finditer(r"\.\d+\.", name))
    if any(_has(text, layer) and _has(text, part) for layer, part in splits):
        return True
    parent, _, last = name.rpartition(".")
    sets = re.findall(rf"(?<![\w.]){re.escape(parent)}\.(\w+(?:\+\w+)+)", text) if parent else []
    return any(last in found.split("+") for found in sets)


def _has(text: str, name: str) -> bool:
    """Return whether a text has a name that no longer name contains."""
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w|\+)", text) is not None


def _same(one: Path, other: Path) -> bool:
    names = {path.name for path in one.iterdir()}
    return names == {path.name for path in other.iterdir()} and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


# What came of it.


def planted(results: Iterable[Tried], mode: str, required: bool = True) -> list[Tried]:
    """Return the damage of a mode that must be found (or need not)."""
    return [each for each in results if each.mode == mode and each.required == required and each.kind != SOUND]


def share(results: Iterable[Tried], mode: str) -> float:
    """Return the share of the damage of a mode that is found of what must be; 1 of nothing."""
    tried = planted(results, mode)
    return sum(each.found for each in tried) / len(tried) if tried else 1.0


def false_alarms(results: Iterable[Tried]) -> list[Tried]:
    """Return the undamaged outputs that verify does not call sound."""
    return [each for each in results if each.kind == SOUND and each.code != 0]


def crashes(results: Iterable[Tried]) -> list[Tried]:
    """Return what ended as no verification may: with a bug, or a complaint about the command line."""
    return [each for each in results if each.code not in (0, *FOUND)]


def table(results: Sequence[Tried]) -> str:
    """Return the table by kind and by layout, with found/planted in each mode."""
    lines = []
    for key, title in (("kind", "kind of damage"), ("layout", "layout"), ("subject", "output")):
        groups = dict.fromkeys(getattr(each, key) for each in results if each.kind != SOUND)
        width = max([len(title), *map(len, groups)], default=len(title))
        lines.append(f"{title:{width}}" + "".join(f"  {mode:>15}" for mode in MODES))
        for group in groups:
            lines.append(f"{group:{width}}" + _cells([each for each in results if getattr(each, key) == group]))
        lines += [f"{'total':{width}}" + _cells(results), ""]
    lines += [
        f"{mode}: {share(results, mode):.1%} of {len(planted(results, mode)):,}"
        for mode in MODES
        if planted(results, mode)
    ]
    beyond = [each for mode in MODES for each in planted(results, mode, required=False)]
    if beyond:
        lines.append(f"not required, found: {sum(each.found for each in beyond):,} of {len(beyond):,}")
    undamaged = [each for each in results if each.kind == SOUND]
    lines.append(f"false alarms: {len(false_alarms(results))} of {len(undamaged)} undamaged")
    lines.append(f"exit codes other than 0, 3, 4, 5: {len(crashes(results))}")
    return "\n".join(lines)


def _cells(results: Iterable[Tried]) -> str:
    cells = []
    for mode in MODES:
        tried = planted(results, mode)
        cells.append(f"{sum(each.found for each in tried)}/{len(tried)}" if tried else "-")
    return "".join(f"  {cell:>15}" for cell in cells)


def missed(results: Iterable[Tried]) -> list[Tried]:
    """Return what must be found and is not, and false alarms."""
    return [each for each in results if each.required and each.kind != SOUND and not each.found] + false_alarms(results)


def missed_line(each: Tried) -> str:
    """Return a line on something missed, with what verify said instead."""
    why = f"exit {each.code}" + (", not named" if each.code in FOUND else "")
    said = f": {each.said}" if each.code != 0 and each.said else ""
    return f"{each.subject} | {each.kind} | {each.mode} | {', '.join(each.places)} ({each.what}) | {why}{said}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the score; return 1 if less is found than required."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", help="layouts, such as modelopt")
    parser.add_argument(
        "--subjects", nargs="*", choices=[*SUBJECTS, *VARIANTS], metavar="S", help=f"outputs: {', '.join(SUBJECTS)}"
    )
    parser.add_argument("--kinds", nargs="*", help="kinds of damage, by a part of their names")
    parser.add_argument("--seed", type=int, default=0, help="where damage is planted, and the values of the models")
    parser.add_argument("--modes", nargs="*", default=list(MODES), help=", ".join(MODES))
    parser.add_argument("--portion", type=float, default=1.0, help="a random portion of the kinds, from 0 to 1")
    parser.add_argument("--all", action="store_true", help="also try without the record what need not be found so")
    parser.add_argument("--misses", action="store_true", help="list what is missed")
    parser.add_argument("--json", type=Path, help="every verification in a file")
    parser.add_argument("--keep", type=Path, help="a new folder in which the damaged outputs stay")
    chosen = parser.parse_args(arguments)
    known = SUBJECTS | VARIANTS
    rows = [known[name] for name in chosen.subjects or SUBJECTS]
    subjects = [row for row in rows if not chosen.layouts or row.layout in chosen.layouts]
    kinds = [row for row in DAMAGE.values() if not chosen.kinds or any(part in row.name for part in chosen.kinds)]

    def progress(line: str, results: Sequence[Tried]) -> None:
        print(line, file=sys.stderr, flush=True)
        if chosen.json is not None:
            content = [asdict(each) | {"found": each.found} for each in results]
            chosen.json.write_text(json.dumps(content, indent=1))

    with tempfile.TemporaryDirectory() as scratch:
        results = score(
            subjects,
            kinds,
            chosen.keep or Path(scratch),
            seed=chosen.seed,
            modes=chosen.modes,
            portion=chosen.portion,
            everything=chosen.all,
            keep=chosen.keep is not None,
            progress=progress,
        )
    print(table(results))
    if chosen.misses:
        print("\n".join(["", "missed:", *map(missed_line, missed(results))]))
    return 1 if missed(results) else 0


if __name__ == "__main__":
    sys.exit(main())
