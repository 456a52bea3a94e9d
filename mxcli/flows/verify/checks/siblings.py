"""Checks of a weight among its siblings: those of the same name in other layers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mxcli.flows.verify.checks.check import PROBLEM, WARNING, Check, Finding
from mxcli.flows.verify.profile import RUN_BYTES, Profile
from mxcli.flows.verify.subject import Subject

PEERS = 4
"""Siblings from which on a weight can be compared with them, itself included."""
OCTAVES, DEVIATIONS = 4.0, 10.0
"""A weight stands out if it is this many octaves and this many robust deviations from the median of its siblings."""
CODE_SHARE = 0.25
"""A weight stands out if this share of its codes would have to be others to have the frequencies of its siblings."""
RANDOM, ORDERED = 1.25, 1.8
"""Scales are in a random order if their rows vary less than the first, and that is odd if those of every sibling vary
more than the second."""
USUAL_ORDER = 3.0
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")
_COMPARE = "Compare with --against SOURCE."


@dataclass(frozen=True)
class Profiled:
    """A checkpoint with the profiles of the weights whose bytes no record proves."""

    subject: Subject
    profiles: Mapping[str, Profile]

    @cached_property
    def siblings(self) -> list[dict[str, Profile]]:
        """The profiles by kind: weights of one name, apart from numbers, and one format."""
        kinds: dict[tuple[str, str, tuple[int, ...]], dict[str, Profile]] = {}
        for name, profile in self.profiles.items():
            weight = self.subject.weights[name].weight
            kinds.setdefault((_NUMBERS.sub("N", name), weight.format.name, weight.shape), {})[name] = profile
        return list(kinds.values())

    def scales_name(self, name: str) -> str:
        """Return the tensor that holds the scales of a weight, alone or with its codes."""
        contents = self.subject.weights[name].contents
        return next((part.entry.name for part in contents if part.holds.name == "scales"), contents[0].entry.name)


def _deviations(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of numbers and their robust standard deviation."""
    known = np.asarray([value for value in values if not math.isnan(value)])
    if not known.size:
        return math.nan, math.nan
    median = float(np.median(known))
    return median, 1.4826 * float(np.median(np.abs(known - median)))


def _magnitudes(profiled: Profiled) -> Iterator[Finding]:
    for siblings in profiled.siblings:
        if len(siblings) < PEERS:
            continue
        for what, values in (
            ("largest value", {name: profile.amax for name, profile in siblings.items()}),
            ("usual scale", {name: profile.level for name, profile in siblings.items()}),
        ):
            median, deviation = _deviations(list(values.values()))
            for name, value in values.items():
                away = value - median
                if abs(away) > max(OCTAVES, DEVIATIONS * deviation):
                    side = "above" if away > 0 else "below"
                    yield Finding(
                        name,
                        f"its {what} is 2^{value:.1f}, {abs(away):.1f} octaves {side} the median of its "
                        f"{len(siblings) - 1:,} siblings",
                        f"about 2^{median:.1f}, as in the same layer elsewhere",
                        _COMPARE,
                    )


def _code_use(profiled: Profiled) -> Iterator[Finding]:
    for siblings in profiled.siblings:
        rows, columns = profiled.subject.weights[next(iter(siblings))].weight.format.block
        # With a scale for many values, their largest one decides on the codes of all others.
        if len(siblings) < PEERS or rows != 1 or columns is None or columns > NARROW:
            continue
        usual = np.median([profile.codes for profile in siblings.values()], axis=0)
        shares = {name: float(np.abs(profile.codes - usual).sum()) / 2 for name, profile in siblings.items()}
        median, deviation = _deviations(list(shares.values()))
        for name, share in shares.items():
            if share > max(CODE_SHARE, median + DEVIATIONS * deviation):
                yield Finding(
                    name,
                    f"{100 * share:.0f} % of its codes would have to be others to have the frequencies of its "
                    f"{len(siblings) - 1:,} siblings (they differ by {100 * median:.1f} %)",
                    "codes as frequent as in the same layer elsewhere",
                    _COMPARE,
                )


def _order(profiled: Profiled) -> Iterator[Finding]:
    for siblings in profiled.siblings:
        effects = {name: p.row_effect for name, p in siblings.items() if p.row_effect is not None}
        if len(effects) < PEERS or float(np.median(list(effects.values()))) < USUAL_ORDER:
            continue
        for name, effect in effects.items():
            others = min(each for other, each in effects.items() if other != name)
            profile = siblings[name]
            in_columns = profile.column_effect is not None and profile.column_effect > 1 + profile.noise
            if effect < RANDOM and others > ORDERED and not in_columns:
                yield Finding(
                    profiled.scales_name(name),
                    f"rows of scales vary {effect:.2f} times as much as in a random order, and at least {others:.2f} "
                    f"times in its {len(effects) - 1:,} siblings",
                    "scales in the order of their blocks: these look shuffled, transposed or swizzled",
                    _COMPARE,
                )


@dataclass(frozen=True, slots=True)
class Oddity:
    """A profile that no trained weight has: how it shows, the value and the need in words,
    and whether the codes are named as the place."""

    shows: Callable[[Profile], bool]
    value: Callable[[Profile], str]
    need: str
    at_codes: bool = True

    def find(self, profiled: Profiled) -> Iterator[Finding]:
        """Yield the weights with such a profile."""
        for name, profile in profiled.profiles.items():
            if self.shows(profile):
                codes = profiled.subject.weights[name].contents[0].entry.name
                yield Finding(codes if self.at_codes else name, self.value(profile), self.need, _COMPARE)


EMPTIED = Oddity(
    lambda profile: profile.emptied > 0,
    lambda profile: f"{profile.emptied:,} of {profile.blocks:,} blocks hold only zeros and have a usual scale",
    "codes that reach the top of their blocks: an empty block has the smallest scale, or 1",
)
CONSTANT = Oddity(
    lambda profile: profile.constant > 0,
    lambda profile: f"{profile.constant:,} runs of {RUN_BYTES:,} bytes hold one code only, not 0",
    "codes that differ, as in a trained layer",
)
WEAK = Oddity(
    lambda profile: 0 < profile.weak < profile.blocks,
    lambda profile: f"{profile.weak:,} of {profile.blocks:,} blocks use less than a third of the range of their codes",
    "codes that reach the top of their blocks: every rule scales them so",
    at_codes=False,
)


def _copies(profiled: Profiled) -> Iterator[Finding]:
    """Yield weights with the same codes as another one; experts may begin as copies."""
    first: dict[str, str] = {}
    for name, profile in profiled.profiles.items():
        other = first.setdefault(profile.digest, name)
        if other != name and profile.codes.max() < 1 and ".experts." not in name:
            yield Finding(
                name,
                f"has the codes of {other}",
                "codes of its own: one of the two was written over the other",
                _COMPARE,
            )


def _scales(profiled: Profiled) -> Iterator[Finding]:
    """Yield scales that no rule gives: the smallest ones of large codes, far outliers, one for all blocks."""
    for siblings in profiled.siblings:
        for name, profile in siblings.items():
            others = [each.scales for other, each in siblings.items() if other != name]
            single = profile.scales == 1 and profile.blocks >= MANY_BLOCKS and len(others) > 1 and min(others) > 1
            faults = (
                (profile.vanished, f"{profile.vanished:,} of {profile.blocks:,} blocks have the smallest scale"),
                (profile.spread > FARTHEST, f"a scale is {profile.spread:.0f} octaves above the median one"),
                (single, f"all {profile.blocks:,} scales are equal, and they differ in {len(others):,} siblings"),
            )
            for is_so, fault in faults:
                if is_so:
                    yield Finding(
                        profiled.scales_name(name),
                        fault,
                        "scales that follow from the values of their blocks",
                        _COMPARE,
                    )


MANY_BLOCKS, FARTHEST, NARROW = 64, 16.0, 64


@dataclass(frozen=True, slots=True)
class PlainSiblings:
    """The largest magnitudes of the plain tensors of a checkpoint by name, and the names of those that are proven to be
    as in the source."""

    amax: Mapping[str, float]
    proven: frozenset[str] = frozenset()


def _zero_among(plain: PlainSiblings) -> Iterator[Finding]:
    """Yield plain tensors that are all 0 though most of their siblings are not."""
    kinds: dict[str, list[str]] = {}
    for name in plain.amax:
        kinds.setdefault(_NUMBERS.sub("N", name), []).append(name)
    for names in kinds.values():
        zero = [name for name in names if plain.amax[name] == 0]
        if zero and len(zero) * 2 < len(names) and names[0].endswith("norm.weight"):
            for name in (name for name in zero if name not in plain.proven):
                yield Finding(
                    name,
                    "all values are 0",
                    f"other values, as in {len(names) - len(zero):,} of {len(names):,} siblings",
                    _COMPARE,
                )


PLAIN_SIBLING_CHECKS: tuple[Check[PlainSiblings], ...] = (
    Check(
        "zero_norm",
        PROBLEM,
        "norms that are all 0 though those of other layers are not",
        "every value of the norms of all layers",
        _zero_among,
    ),
)
SIBLING_CHECKS: tuple[Check[Profiled], ...] = (
    Check(
        "emptied_blocks",
        PROBLEM,
        "blocks whose codes were lost",
        "blocks of zeros whose scale is above a 64th of the median, and not 1",
        EMPTIED.find,
    ),
    Check(
        "odd_scales",
        PROBLEM,
        "scales of blocks that no rule gives",
        "the smallest E8M0 scale with large codes; a scale 16 octaves above the median; one scale for all blocks, "
        "unlike in the siblings",
        _scales,
    ),
    Check(
        "constant_codes",
        PROBLEM,
        "weights of which a part has a single value",
        f"runs of {RUN_BYTES:,} equal bytes that are not 0, if most of the weight is not so",
        CONSTANT.find,
    ),
    Check(
        "copied_codes",
        PROBLEM,
        "weights that are copies of another one",
        "the codes of every weight against those of all others, except experts",
        _copies,
    ),
    Check(
        "weak_blocks",
        WARNING,
        "blocks that use little of their range",
        "blocks whose largest code is below 0.3 of the largest of the format, though their scale is not clamped",
        WEAK.find,
    ),
    Check(
        "odd_magnitude",
        PROBLEM,
        "weights far larger or smaller than the same layer elsewhere",
        "largest value and median scale in octaves against the siblings, by median and median deviation",
        _magnitudes,
    ),
    Check(
        "odd_codes",
        PROBLEM,
        "weights whose codes are used unlike in the same layer elsewhere",
        "the frequency of every code byte against the siblings, in formats with blocks of at most 64",
        _code_use,
    ),
    Check(
        "odd_order",
        PROBLEM,
        "scales that are not in the order of their blocks",
        "how much rows of scales vary, against a random order and the siblings; exchanged rows and layers cannot be "
        "seen so",
        _order,
    ),
)
