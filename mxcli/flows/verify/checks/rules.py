"""The rules that a record and a configuration state for each weight, and the check that they agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mxcli.errors import UsageError
from mxcli.files.model_files import RECORD
from mxcli.flows.verify.checks.check import PROBLEM, Check, Finding
from mxcli.flows.verify.subject import Subject
from mxcli.flows.write.restore import StoredWeight
from mxcli.numerics.blocks import divides, grid_shape
from mxcli.numerics.hadamard import signs_text
from mxcli.numerics.scheme import TENSOR_RULES, Rules, Scheme, overlaid, resolve

ROUNDING = "rounding"
_RULES = ("scale_rounding", ROUNDING, "dialect")


@dataclass(frozen=True, slots=True)
class Stated:
    """Schemes that the metadata names for a weight, its own first; `draws_unknown` if one of them is random and its
    seed is not recorded."""

    schemes: tuple[Scheme, ...] = ()
    draws_unknown: bool = False


def stated_schemes(subject: Subject) -> dict[str, Stated]:
    """Return the schemes stated for each weight: by the record, which lists a stack of experts as a whole, and by the
    configuration, which has no seed. Transforms are those of the configuration, which decide how codes are read."""
    recorded = {name: _scheme(record) for name, record in subject.recorded_tensors.items()}
    known = tuple(dict.fromkeys(scheme for scheme in recorded.values() if scheme is not None))
    return {name: _stated(subject, stored, recorded.get(name), known) for name, stored in subject.weights.items()}


def _stated(subject: Subject, stored: StoredWeight, own: Scheme | None, known: tuple[Scheme, ...]) -> Stated:
    weight = stored.weight
    schemes = [own] if own is not None else [scheme for scheme in known if scheme.format == weight.format]
    unknown = False
    if subject.layout is not None and subject.layout.names_rules:
        unknown = weight.scheme.rounding.is_random and not any(scheme.rounding.is_random for scheme in schemes)
        schemes += [] if weight.scheme.rounding.is_random else [replace(weight.scheme, nonfinite="saturate")]
    fitting = [replace(scheme, hadamard=weight.scheme.hadamard) for scheme in schemes if scheme.format == weight.format]
    return Stated(tuple(dict.fromkeys(fitting)), unknown)


def _scheme(record: Mapping[str, object]) -> Scheme | None:
    """Return the scheme that a record names; None unless it is known."""
    seed = record.get("seed", 0)
    try:
        rules = Rules(seed=seed if isinstance(seed, int) else 0)
        named = {key: str(record[key]) for key in TENSOR_RULES if record.get(key) is not None}
        return resolve(str(record.get("format")), overlaid(rules, named))
    except UsageError:
        return None


def _contradictions(subject: Subject) -> Iterator[Finding]:
    for name, record in subject.recorded_tensors.items():
        stored = subject.weights.get(name)
        if stored is None:
            continue
        ours, theirs = _configured_rules(subject, stored), _recorded_rules(record)
        if _means_the_same(stored, _scheme(record)):
            theirs["format"] = ours["format"]
        differing = [key for key in ours if key in theirs and ours[key] != theirs[key]]
        if differing:
            yield Finding(
                name,
                ", ".join(f"{key} {ours[key]}" for key in differing),
                f"as recorded in {RECORD}: {', '.join(f'{key} {theirs[key]}' for key in differing)}",
                "Restore the config.json written with it.",
            )


def _means_the_same(stored: StoredWeight, recorded: Scheme | None) -> bool:
    """Return whether the recorded format has the elements, scales and grid of the weight: a row of 128 is one block of
    128 and a channel."""
    if recorded is None or not divides(recorded.format, stored.weight.shape):
        return False
    ours, theirs, shape = stored.weight.format, recorded.format, stored.weight.shape
    same_kind = (ours.element, ours.scale, ours.tensor_scale) == (theirs.element, theirs.scale, theirs.tensor_scale)
    return same_kind and grid_shape(ours, shape) == grid_shape(theirs, shape)


def _configured_rules(subject: Subject, stored: StoredWeight) -> dict[str, str]:
    """Return the rules of a weight that the configuration states."""
    weight, scheme = stored.weight, stored.weight.scheme
    described = {"format": scheme.format.name}
    if subject.layout is None or not subject.layout.names_rules:
        return described
    transform = "none" if scheme.hadamard is None else signs_text(scheme.hadamard)
    names = (scheme.scale_rule.name, scheme.rounding.name, scheme.dialect.name)
    return {**described, "axis": weight.axis, "transform": transform, **dict(zip(_RULES, names, strict=True))}


def _recorded_rules(record: Mapping[str, object]) -> dict[str, str]:
    """Return the rules that the record of a tensor states."""
    scheme, hadamard = _scheme(record), record.get("hadamard")
    rules = {key: str(record[key]) for key in ("axis", *_RULES) if record.get(key) is not None}
    if record.get("format") is not None:
        rules["format"] = scheme.format.name if scheme is not None else str(record["format"])
        rules["transform"] = str(hadamard.get("signs")) if isinstance(hadamard, Mapping) else "none"
    return rules


RULE_CHECKS: tuple[Check[Subject], ...] = (
    Check(
        "recorded_rules",
        PROBLEM,
        "weights whose configuration contradicts the record: they are misread",
        f"the format of every weight recorded in {RECORD}, and its axis, transform and rules if the layout names them",
        _contradictions,
    ),
)
