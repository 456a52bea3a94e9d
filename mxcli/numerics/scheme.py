"""Schemes: a format and rules by name, resolved to the one record that kernels take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypedDict

from mxcli.errors import UsageError, did_you_mean, printable, together
from mxcli.numerics.dialects import Dialect, ProducerChoice, find_dialect
from mxcli.numerics.floats import FP32
from mxcli.numerics.formats import BlockFormat, find_format
from mxcli.numerics.hadamard import Hadamard, stated_hadamard
from mxcli.numerics.mantissa_rules import MANTISSA_SCALE_RULES, MantissaScaleRule
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS, POWER_OF_TWO_SCALE_RULES, ElementRounding, PowerOfTwoScaleRule
from mxcli.numerics.streams import check_draws

NONFINITE_POLICIES = ("error", "saturate", "nan-block")

ScaleRule = PowerOfTwoScaleRule | MantissaScaleRule

_BOTH: list[ScaleRule] = [*POWER_OF_TWO_SCALE_RULES.values(), *MANTISSA_SCALE_RULES.values()]
_NAMES = {known: rule.name for rule in _BOTH for known in (rule.name, *rule.aliases)}


@dataclass(frozen=True, slots=True)
class Rules:
    """The rule options as requested, for every format: names of rules (None: the dialect's choice), the policy for
    non-finite input, the seed of stochastic rounding (None: 0) and the transform to apply first."""

    scale_rounding: str | None = None
    rounding: str | None = None
    dialect: str | None = None
    nonfinite: str = "saturate"
    seed: int | None = None
    hadamard: Hadamard | None = None


class RuleOptions(TypedDict, total=False):
    """The rule options as keywords, spelled as on the command line: a transform is a size and a seed of its signs."""

    scale_rounding: str | None
    rounding: str | None
    dialect: str | None
    nonfinite: str
    seed: int | None
    hadamard: int | None
    hadamard_seed: int | None


RULE_NAMES = tuple(field.name for field in fields(Rules))
TENSOR_RULES = ("scale_rounding", "rounding", "dialect")
"""The rules that may differ from tensor to tensor."""


def overlaid(rules: Rules, named: Mapping[str, str | None]) -> Rules:
    """Return the rules with those of TENSOR_RULES replaced that are named and not None."""
    given: dict[str, Any] = {name: named[name] for name in TENSOR_RULES if named.get(name) is not None}
    return replace(rules, **given)


def tensor_rules(rules: Rules) -> dict[str, str | None]:
    """Return the rules that may differ from tensor to tensor, by name."""
    return {name: getattr(rules, name) for name in TENSOR_RULES}


def rules_from(options: Mapping[str, Any]) -> Rules:
    """Return the rules of keywords named as in RuleOptions; raises UsageError for a transform that does not exist."""
    named = dict(options)
    unknown = named.keys() - RuleOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unexpected keyword {min(unknown)!r}: rules are {', '.join(RuleOptions.__annotations__)}")
    hadamard = stated_hadamard(named.pop("hadamard", None), named.pop("hadamard_seed", None))
    return Rules(**named, hadamard=hadamard)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A format with all rules resolved: the bytes depend on it and the input only.

    Stochastic rounding draws by `seed` (0 for other roundings), the tensor's stream and the element's index. `hadamard`
    is applied to the input first, unless it is None.
    """

    format: BlockFormat
    scale_rule: PowerOfTwoScaleRule | MantissaScaleRule
    rounding: ElementRounding
    dialect: Dialect
    choice: ProducerChoice
    nonfinite: str
    seed: int = 0
    hadamard: Hadamard | None = None

    @property
    def infinity_is_nan(self) -> bool:
        """True if an infinity makes its block NaN, as a NaN does."""
        return self.nonfinite == "nan-block" or self.choice.infinity_is_nan


def scale_kind(row: BlockFormat) -> str:
    """Return the kind of scale that rules serve: `e8m0`, `narrow` (8 bits with a mantissa) or `fp32`."""
    if row.has_power_of_two_scales:
        return "e8m0"
    return "fp32" if row.scale is FP32 else "narrow"


def resolve(format: str | BlockFormat, rules: Rules = Rules()) -> Scheme:
    """Return the scheme of a format under rules; what they leave open is the dialect's choice.

    Power-of-two rules also serve binary32 scales, which then hold powers of two. The seed is used by stochastic
    rounding only. Raises UsageError for an unknown name, a rule that does not serve the format, or a seed that is not
    an integer of 32 bits.
    """
    row = find_format(format) if isinstance(format, str) else format
    bundle = find_dialect(rules.dialect)
    check_nonfinite(rules.nonfinite)
    if rules.rounding is not None:
        find_rounding(rules.rounding)
    choice = bundle.choice(scale_kind(row), row.element.name, row.block_name)
    if choice is None:
        if rules.scale_rounding is None:
            raise UsageError(
                f"{bundle.name} has no rule for {row.name} ({row.element.name} elements, {row.scale.name} scales): "
                f"name one with --scale-rounding, or another --as"
            )
        choice = ProducerChoice(rules.scale_rounding)
    rule = _rule(row, rules.scale_rounding or choice.rule)
    seed = 0 if rules.seed is None else rules.seed
    check_draws(seed)
    rounding = ELEMENT_ROUNDINGS[rules.rounding or choice.rounding]
    hadamard = rules.hadamard and replace(rules.hadamard, bf16=choice.bf16_transform)
    return Scheme(row, rule, rounding, bundle, choice, rules.nonfinite, seed if rounding.is_random else 0, hadamard)


def check_nonfinite(policy: str) -> None:
    """Raise UsageError unless `policy` is one of NONFINITE_POLICIES."""
    if policy not in NONFINITE_POLICIES:
        raise UsageError(f"unknown policy '{printable(policy)}': --nonfinite takes {', '.join(NONFINITE_POLICIES)}")


def check_scale_rule(name: str) -> None:
    """Raise UsageError unless a scale rule of that name exists for some format."""
    if find_scale_rule(name) is None:
        known = tuple(dict.fromkeys(rule.name for rule in _BOTH))
        raise UsageError(
            f"unknown scale rounding '{printable(name)}': known are {', '.join(known)}.{did_you_mean(name, known)}"
        )


RULE_CHECKS: Mapping[str, Callable[[str], object]] = {
    "scale_rounding": check_scale_rule,
    "rounding": lambda name: find_rounding(name),
    "dialect": find_dialect,
    "nonfinite": check_nonfinite,
}
"""Checks of rule options by the field of Rules, for any format: each raises UsageError for an unknown name."""


def scale_rules(row: BlockFormat) -> list[str]:
    """Name of the scale rules that serve a format, in the tables' order."""
    return list(_serving(row))


def mantissa_rules(row: BlockFormat) -> list[str]:
    """Name of the rules of the format's own kind of scale, if that has a mantissa."""
    return [name for name, rule in _serving(row).items() if isinstance(rule, MantissaScaleRule)]


@cache
def _serving(row: BlockFormat) -> Mapping[str, ScaleRule]:
    kind = scale_kind(row)
    found: list[ScaleRule] = [rule for rule in POWER_OF_TWO_SCALE_RULES.values() if kind != "narrow"]
    found += [rule for rule in MANTISSA_SCALE_RULES.values() if rule.scale == kind]
    return {rule.name: rule for rule in found if rule.serves(row.element)}


def resolve_all(formats: Iterable[str], rules: Rules = Rules()) -> list[Scheme]:
    """Return the scheme of each format as `resolve` does; raises UsageError naming every problem at once."""
    schemes, problems = list[Scheme](), list[str]()
    for name in formats:
        try:
            schemes.append(resolve(name, rules))
        except UsageError as error:
            problems += error.reasons
    if problems:
        raise together(UsageError, "Names that mean nothing", list(dict.fromkeys(problems)))
    return schemes


def find_rounding(name: str) -> ElementRounding:
    """Return the element rounding of that name; raises UsageError for an unknown name."""
    rounding = ELEMENT_ROUNDINGS.get(name)
    if rounding is None:
        raise UsageError(
            f"unknown element rounding '{printable(name)}': known are {', '.join(ELEMENT_ROUNDINGS)}."
            f"{did_you_mean(name, ELEMENT_ROUNDINGS)}"
        )
    return rounding


def find_scale_rule(name: str) -> str | None:
    """Return the name of the scale rules, for any kind of scale, that are called so; None for none."""
    return _NAMES.get(name.strip().lower())


def _rule(row: BlockFormat, name: str) -> ScaleRule:
    known, serving = find_scale_rule(name), _serving(row)
    if known is None:
        raise UsageError(
            f"unknown scale rounding '{printable(name)}': {row.name} takes {', '.join(scale_rules(row))}."
            f"{did_you_mean(name.strip(), _NAMES)}"
        )
    if known not in serving:
        raise UsageError(
            f"scale rounding {known} does not serve {row.name} ({row.element.name} elements, {row.scale.name} "
            f"scales): it takes {', '.join(serving)}"
        )
    return serving[known]
