"""Names resolved to numbers: a format, a scale rule, a rounding and a dialect become the one record kernels take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mxcli.errors import UsageError, did_you_mean, printable, together
from mxcli.numerics.dialects import Choice, Dialect, find_dialect
from mxcli.numerics.draws import check_draws
from mxcli.numerics.floats import FP32
from mxcli.numerics.formats import BlockFormat, find_format
from mxcli.numerics.hadamard import Hadamard
from mxcli.numerics.rounding import (
    ELEMENT_ROUNDINGS,
    POWER_OF_TWO_ROUNDINGS,
    SCALE_RECIPES,
    ElementRounding,
    ScaleRecipe,
    ScaleRounding,
)

NONFINITE_POLICIES = ("error", "saturate", "nan-block")

_BOTH: list[ScaleRounding | ScaleRecipe] = [*POWER_OF_TWO_ROUNDINGS.values(), *SCALE_RECIPES.values()]
_RULES = {known: rule for rule in _BOTH for known in (rule.name, *rule.aliases)}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to quantize, completely: which bytes come out depends on this and the input only.

    A rounding that is random draws by `seed` (0 where none is), the tensor's stream and the element's index.
    `hadamard` is applied to the input first (None: none is).
    """

    format: BlockFormat
    scale_rule: ScaleRounding | ScaleRecipe
    rounding: ElementRounding
    dialect: Dialect
    choice: Choice
    nonfinite: str
    seed: int = 0
    hadamard: Hadamard | None = None

    @property
    def infinity_is_nan(self) -> bool:
        """Whether an infinity makes its block NaN, as a NaN does."""
        return self.nonfinite == "nan-block" or self.choice.infinity_is_nan


def scale_kind(row: BlockFormat) -> str:
    """The kind of scale that rules serve: `e8m0`, `narrow` (8 bits with a mantissa) or `fp32`."""
    if row.has_power_of_two_scales:
        return "e8m0"
    return "fp32" if row.scale is FP32 else "narrow"


def resolve(
    format: str | BlockFormat,
    *,
    scale_rounding: str | None = None,
    rounding: str | None = None,
    dialect: str | None = None,
    nonfinite: str = "saturate",
    seed: int = 0,
    hadamard: Hadamard | None = None,
) -> Recipe:
    """The recipe those names mean. What is not named is the dialect's choice.

    Power-of-two rules also serve binary32 scales, which then hold powers of two. `seed` is that of a random rounding,
    and of no account to others. Raises UsageError for an unknown name, a rule that does not serve the format, or a
    seed that is no whole number of 32 bits.
    """
    row = find_format(format) if isinstance(format, str) else format
    bundle = find_dialect(dialect)
    if nonfinite not in NONFINITE_POLICIES:
        raise UsageError(f"unknown policy '{printable(nonfinite)}': --nonfinite takes {', '.join(NONFINITE_POLICIES)}")
    if rounding is not None:
        find_rounding(rounding)
    choice = bundle.choice(scale_kind(row), row.element.name)
    if choice is None:
        if scale_rounding is None:
            raise UsageError(
                f"{bundle.name} has no rule for {row.name} ({row.element.name} elements, {row.scale.name} scales): "
                f"name one with --scale-rounding, or another --as"
            )
        choice = Choice(scale_rounding)
    rule = _rule(row, scale_rounding or choice.rule)
    check_draws(seed)
    element_rounding = ELEMENT_ROUNDINGS[rounding or choice.rounding]
    own_seed = seed if element_rounding.is_random else 0
    return Recipe(row, rule, element_rounding, bundle, choice, nonfinite, own_seed, hadamard)


def scale_rules(row: BlockFormat) -> list[str]:
    """Names of the scale rules that serve a format, in the tables' order."""
    kind = scale_kind(row)
    names = [rule.name for rule in POWER_OF_TWO_ROUNDINGS.values() if kind != "narrow" and rule.serves(row.element)]
    return names + [recipe.name for recipe in SCALE_RECIPES.values() if recipe.scale == kind]


def resolve_all(formats: Iterable[str], **rules: str | None) -> list[Recipe]:
    """The recipe of each format, as `resolve` has it; raises UsageError naming every problem at once."""
    recipes, problems = list[Recipe](), list[str]()
    for name in formats:
        try:
            recipes.append(resolve(name, **rules))  # type: ignore[arg-type]
        except UsageError as error:
            problems += error.reasons
    if problems:
        raise together(UsageError, "Names that mean nothing", list(dict.fromkeys(problems)))
    return recipes


def find_rounding(name: str) -> ElementRounding:
    """The element rounding of that name; raises UsageError where there is none."""
    rounding = ELEMENT_ROUNDINGS.get(name)
    if rounding is None:
        raise UsageError(
            f"unknown element rounding '{printable(name)}': known are {', '.join(ELEMENT_ROUNDINGS)}."
            f"{did_you_mean(name, ELEMENT_ROUNDINGS)}"
        )
    return rounding


def find_scale_rule(name: str) -> ScaleRounding | ScaleRecipe | None:
    """The rule or recipe of that name, whichever format it serves; None: there is none."""
    return _RULES.get(name.strip().lower())


def _rule(row: BlockFormat, name: str) -> ScaleRounding | ScaleRecipe:
    rule = find_scale_rule(name)
    if rule is None:
        raise UsageError(
            f"unknown scale rounding '{printable(name)}': {row.name} takes {', '.join(scale_rules(row))}."
            f"{did_you_mean(name.strip(), _RULES)}"
        )
    if rule.name not in scale_rules(row):
        raise UsageError(
            f"scale rounding {rule.name} does not serve {row.name} ({row.element.name} elements, {row.scale.name} "
            f"scales): it takes {', '.join(scale_rules(row))}"
        )
    return rule
