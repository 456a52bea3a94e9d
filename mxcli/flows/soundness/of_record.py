"""What the record beside a checkpoint says of how each weight was made, held against what its configuration says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mxcli.errors import UsageError
from mxcli.files.model_files import RECORD
from mxcli.flows.restoring import StoredWeight
from mxcli.flows.soundness.finding import PROBLEM, Check, Finding
from mxcli.flows.soundness.subject import Subject
from mxcli.numerics.hadamard import signs_text
from mxcli.numerics.recipe import Recipe, resolve

ROUNDING = "rounding"
_RULES = ("scale_rounding", ROUNDING, "dialect")


@dataclass(frozen=True, slots=True)
class Stated:
    """Recipes that a weight is said to be made by, those said of itself first; `draws_unknown` where one of them is
    random and nothing says by which seed."""

    recipes: tuple[Recipe, ...] = ()
    draws_unknown: bool = False


def stated_recipes(subject: Subject) -> dict[str, Stated]:
    """What is said of each weight: by the record, which of a stack of experts knows the whole alone, and by the
    configuration, which knows no seed. Transforms are those of the configuration, by which codes are read."""
    recorded = {name: _recipe(told) for name, told in subject.recorded_tensors.items()}
    known = tuple(dict.fromkeys(recipe for recipe in recorded.values() if recipe is not None))
    return {name: _stated(subject, stored, recorded.get(name), known) for name, stored in subject.weights.items()}


def _stated(subject: Subject, stored: StoredWeight, own: Recipe | None, known: tuple[Recipe, ...]) -> Stated:
    weight = stored.weight
    recipes = [own] if own is not None else [recipe for recipe in known if recipe.format == weight.format]
    unknown = False
    if subject.layout is not None and subject.layout.names_rules:
        unknown = weight.recipe.rounding.is_random and not any(recipe.rounding.is_random for recipe in recipes)
        recipes += [] if weight.recipe.rounding.is_random else [replace(weight.recipe, nonfinite="saturate")]
    fitting = [replace(recipe, hadamard=weight.recipe.hadamard) for recipe in recipes if recipe.format == weight.format]
    return Stated(tuple(dict.fromkeys(fitting)), unknown)


def _recipe(told: Mapping[str, object]) -> Recipe | None:
    """The recipe that the record names; None where it names none that is known."""
    seed = told.get("seed", 0)
    try:
        return resolve(
            str(told.get("format")),
            **{key: str(told[key]) if told.get(key) is not None else None for key in _RULES},  # type: ignore[arg-type]
            seed=seed if isinstance(seed, int) else 0,
        )
    except UsageError:
        return None


def _contradictions(subject: Subject) -> Iterator[Finding]:
    for name, told in subject.recorded_tensors.items():
        stored = subject.weights.get(name)
        if stored is None:
            continue
        ours, theirs = _described(subject, stored), _recorded(told)
        apart = [key for key in ours if key in theirs and ours[key] != theirs[key]]
        if apart:
            yield Finding(
                name,
                ", ".join(f"{key} {ours[key]}" for key in apart),
                f"what {RECORD} records: {', '.join(f'{key} {theirs[key]}' for key in apart)}",
                "Copy the config.json again that was written with it.",
            )


def _described(subject: Subject, stored: StoredWeight) -> dict[str, str]:
    """How the configuration describes a weight, as far as its layout says so."""
    weight, recipe = stored.weight, stored.weight.recipe
    described = {"format": recipe.format.name}
    if subject.layout is None or not subject.layout.names_rules:
        return described
    transform = "none" if recipe.hadamard is None else signs_text(recipe.hadamard)
    names = (recipe.scale_rule.name, recipe.rounding.name, recipe.dialect.name)
    return {**described, "axis": weight.axis, "transform": transform, **dict(zip(_RULES, names, strict=True))}


def _recorded(told: Mapping[str, object]) -> dict[str, str]:
    """The same of what the record says of a tensor; what it does not say is left out."""
    recipe, hadamard = _recipe(told), told.get("hadamard")
    said = {key: str(told[key]) for key in ("axis", *_RULES) if told.get(key) is not None}
    if told.get("format") is not None:
        said["format"] = recipe.format.name if recipe is not None else str(told["format"])
        said["transform"] = str(hadamard.get("signs")) if isinstance(hadamard, Mapping) else "none"
    return said


RECORD_CHECKS: tuple[Check[Subject], ...] = (
    Check(
        "recorded_rules",
        PROBLEM,
        "weights that the configuration describes otherwise than the record of their making: they are read wrongly",
        f"the format of every weight that {RECORD} records, and where the layout names them its axis, transform and "
        "rules",
        _contradictions,
    ),
)
