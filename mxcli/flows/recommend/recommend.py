"""Recommendations for a target: the format of each layer, or keeping it, measured and then chosen optimally."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mxcli.backends.backend import Backend
from mxcli.errors import RefusedError, import_extra, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import MXCLI
from mxcli.files.tensors import TensorInfo
from mxcli.flows.measure.inspect import Total, totals_by
from mxcli.flows.measure.measure import measure, memory_to_measure
from mxcli.flows.measure.nonfinite import nonfinite_refusals, refuse_nonfinite
from mxcli.flows.measure.report import Report, Tally
from mxcli.flows.plan.memory import Need
from mxcli.flows.plan.overrides import Override, names_matching
from mxcli.flows.plan.plan import Options, Plan, TensorPlan, make_plan
from mxcli.flows.plan.recipe_text import quoted_selector, resolved, spelled_format
from mxcli.flows.products.output_error import MOST_ROWS, CapturedInputs
from mxcli.flows.recommend.candidates import (
    KEEP,
    Effect,
    Group,
    Option,
    Target,
    bits_of,
    check_reachable,
    choose,
    formats_of,
    groups_of,
    kept_bits,
)
from mxcli.flows.write.arrange import arrange
from mxcli.numerics.formats import find_format
from mxcli.numerics.metrics import OUTPUT_ERROR, WEIGHT_ERROR, Objective
from mxcli.numerics.scheme import Rules, find_scale_rule, resolve, scale_rules
from mxcli.numerics.stats import Stats

Progress = Callable[[TensorInfo], None]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates, from headers alone: a plan for each format, the groups of tensors, and for each group the stored
    `bits` of every format it can have and of KEEP."""

    formats: tuple[str, ...]
    plans: tuple[Plan, ...]
    groups: tuple[Group, ...]
    bits: tuple[Mapping[str, int], ...]
    target: Target

    @property
    def elements(self) -> int:
        """Elements of all groups."""
        return sum(group.elements for group in self.groups)


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """A group, its options in the order named with KEEP at the end, and which of them it gets."""

    group: Group
    options: tuple[Option, ...]
    chosen: int

    @property
    def option(self) -> Option:
        """The chosen option."""
        return self.options[self.chosen]

    def of(self, name: str) -> Option | None:
        """Return an option by name; None: the group cannot have it."""
        return next((option for option in self.options if option.name == name), None)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A recommendation for a source: a choice for each group in the order of the source.

    `harm` is the objective, `bound` a proven lower bound on it, and `exact` says that no choice is better;
    `smallest_harm` is the objective where every group has its smallest option. `recipe` are the options that
    `quantize` carries out, `plan` what it will do, and `report` what it will report.
    """

    source: str
    total: Total
    by_dtype: Mapping[str, Total]
    formats: tuple[str, ...]
    target: Target
    objective: Objective
    choices: tuple[GroupChoice, ...]
    harm: float
    bound: float
    exact: bool
    smallest_harm: float
    recipe: Options
    plan: Plan
    report: Report | None
    notes: tuple[str, ...]

    @property
    def elements(self) -> int:
        """Elements of all tensors that were chosen for."""
        return sum(choice.group.elements for choice in self.choices)

    @property
    def bits_per_element(self) -> float:
        """Stored bits of those tensors per element, kept ones and all scales included."""
        return sum(choice.option.bits for choice in self.choices) / self.elements

    @property
    def kept(self) -> tuple[GroupChoice, ...]:
        """The groups that are kept."""
        return tuple(choice for choice in self.choices if choice.option.name == KEEP)


def plan_candidates(checkpoint: Checkpoint, formats: Sequence[str], options: Options, target: Target) -> Candidates:
    """Return the candidates; `options` are those of `quantize`, and each of `formats` has its scale rule where that
    serves it.

    Raises like `make_plan`, with the refusals of all formats at once, and RefusedError for a target out of reach.
    """
    if checkpoint.captures:
        raise RefusedError(
            f"{printable(checkpoint.where)}: a capture file. Give the checkpoint, and this file with --captures."
        )
    names = list(dict.fromkeys(map(spelled_format, formats)))
    rule = options.rules.scale_rounding
    if rule is not None and not any(_serves(rule, name) for name in names):
        resolve(names[0], Rules(rule))
    plans, layouts = _arranged(checkpoint, names, options)
    if options.layout is None and MXCLI.name in layouts:
        # What one format needs decides for all, so that the choice cannot change what a layout holds.
        plans, _ = _arranged(checkpoint, names, replace(options, layout=MXCLI.name))
    groups, steps = groups_of(plans, checkpoint.config), _by_name(plans)
    bits = [
        {
            **{names[at]: sum(bits_of(steps[at][i.name]) for i in group.tensors) for at in formats_of(group, steps)},
            KEEP: sum(map(kept_bits, group.tensors)),
        }
        for group in groups
    ]
    check_reachable(target, groups, [list(each.items()) for each in bits])
    return Candidates(tuple(names), tuple(plans), groups, tuple(bits), target)


def _arranged(checkpoint: Checkpoint, names: Sequence[str], options: Options) -> tuple[list[Plan], set[str]]:
    """Return a plan per format, restricted to what its layout can store, and the layouts; raises all refusals at
    once."""
    plans, layouts, refusals = list[Plan](), set[str](), list[str]()
    for name in names:
        rule = options.rules.scale_rounding
        rules = replace(options.rules, scale_rounding=rule if rule and _serves(rule, name) else None)
        try:
            plan = make_plan(checkpoint, replace(options, format=name, rules=rules))
            arrangement = arrange(checkpoint, plan)
        except RefusedError as refused:
            refusals += refused.reasons
        else:
            plans.append(replace(plan, tensors=arrangement.tensors))
            layouts.add(arrangement.layout.name)
    if refusals:
        raise together(RefusedError, "What cannot be recommended for as it is", list(dict.fromkeys(refusals)))
    return plans, layouts


def memory_to_recommend(candidates: Candidates, inputs: CapturedInputs | None) -> Need:
    """Return the memory of `recommend`; with captured inputs that is codes and values of a tensor, and the rows."""
    need = memory_to_measure(*candidates.plans)
    if inputs is None:
        return need
    widest = max(info.shape[-1] for group in candidates.groups for info in group.tensors)
    largest = max(info.elements for group in candidates.groups for info in group.tensors)
    rows = min(inputs.most_rows, MOST_ROWS)
    return replace(need, peak_bytes=need.peak_bytes + largest * (len(candidates.plans) + 4) + 16 * rows * widest)


def recommend(
    source: str,
    checkpoint: Checkpoint,
    candidates: Candidates,
    *,
    backend: Backend,
    inputs: CapturedInputs | None = None,
    on_tensor: Progress = lambda info: None,
) -> Recommendation:
    """Measure every tensor under every format and choose; each is read once, or twice where inputs were captured.

    `on_tensor` is called with each as it is done. Raises RefusedError for values that are not finite, if the options
    refuse them, and for a target that cannot be reached.
    """
    if inputs is not None:
        import_extra("torch", "weighing errors with captured inputs")
        inputs.check([planned for steps in _by_name(candidates.plans)[:1] for planned in steps.values()])
    measured = _Measured(checkpoint, candidates, backend, inputs)
    measured.run(on_tensor)
    options = [measured.options(group) for group in candidates.groups]
    best = choose(candidates.target, candidates.groups, options)
    choices = tuple(
        GroupChoice(group, each, at) for group, each, at in zip(candidates.groups, options, best.chosen, strict=True)
    )
    smallest = [min(each, key=lambda option: option.bits) for each in options]
    recipe, plan = _recipe(checkpoint, candidates, choices)
    infos = checkpoint.tensors.values()
    return Recommendation(
        source=source,
        total=Total.of(infos),
        by_dtype=totals_by(lambda info: info.dtype, infos),
        formats=candidates.formats,
        target=candidates.target,
        objective=objective_of(inputs),
        choices=choices,
        harm=math.fsum(choice.option.harm for choice in choices),
        bound=best.bound,
        exact=best.exact,
        smallest_harm=math.fsum(option.harm for option in smallest),
        recipe=recipe,
        plan=plan,
        report=measured.report(source, plan),
        notes=tuple(dict.fromkeys([*checkpoint.notes, *plan.notes, *measured.notes(), *_stack_notes(plan)])),
    )


def objective_of(inputs: CapturedInputs | None) -> Objective:
    """Return the objective: the error of weights, or of outputs where inputs were captured."""
    return WEIGHT_ERROR if inputs is None else OUTPUT_ERROR


class _Measured:
    """The effects of formats on tensors: statistics, and with captured inputs the error of outputs."""

    def __init__(
        self, checkpoint: Checkpoint, candidates: Candidates, backend: Backend, inputs: CapturedInputs | None
    ) -> None:
        self._checkpoint, self._candidates, self._backend, self._inputs = checkpoint, candidates, backend, inputs
        self._steps = _by_name(candidates.plans)
        self._stats: dict[tuple[str, int], Stats] = {}
        self._outputs: dict[tuple[str, int], tuple[float, float]] = {}
        self._unusable = Counter[str]()
        self._without_input = list[str]()

    def run(self, on_tensor: Progress) -> None:
        """Measure everything; groups that can have the same formats go together, so that each tensor is read once."""
        refusals: list[str] = []
        for plans, which in self._passes():
            for steps, made in measure(self._checkpoint, plans, self._backend, codes=self._inputs is not None):
                info = steps[0].tensor
                for at, quantized in zip(which, made, strict=True):
                    assert quantized.stats is not None
                    self._stats[info.name, at] = quantized.stats
                refusals += nonfinite_refusals(steps[0], self._stats[info.name, which[0]])
                if self._inputs is not None and self._inputs.has(steps[0]):
                    errors = self._inputs.errors(self._checkpoint, steps[0], made, self._backend)
                    self._outputs |= {(info.name, at): error for at, error in zip(which, errors, strict=True)}
                elif self._inputs is not None:
                    self._without_input.append(info.name)
                on_tensor(info)
        refuse_nonfinite(refusals)

    def options(self, group: Group) -> tuple[Option, ...]:
        """Return the options of a group: formats in the order named, then keeping it."""
        found = []
        for at in formats_of(group, self._steps):
            name = self._candidates.formats[at]
            option = Option(name, tuple(self._effect(info.name, at) for info in group.tensors))
            if math.isfinite(option.harm):
                found.append(option)
            else:
                self._unusable[name] += 1
        kept = tuple(Effect(kept_bits(info), 0.0, math.inf) for info in group.tensors)
        return (*found, Option(KEEP, kept))

    def report(self, source: str, plan: Plan) -> Report | None:
        """Return the report of quantizing as planned; None if nothing is quantized."""
        tally = Tally(source, self._checkpoint, plan)
        for planned in plan.quantized:
            assert planned.scheme is not None
            at = next(
                at for at in range(len(self._steps)) if self._steps[at][planned.tensor.name].scheme == planned.scheme
            )
            tally.add(planned, self._stats[planned.tensor.name, at])
        return tally.report() if plan.quantized else None

    def notes(self) -> Iterator[str]:
        """Yield notes on the measurement."""
        yield from () if self._inputs is None else self._inputs.notes
        if self._inputs is not None and self._inputs.most_rows > MOST_ROWS:
            yield f"Of layers with more than {MOST_ROWS:,} captured rows {MOST_ROWS:,} were drawn, always the same."
        if self._inputs is not None and self._inputs.several:
            yield f"Inputs of {self._inputs.several} count alike, as one sample."
        if self._without_input:
            count, first = len(self._without_input), printable(self._without_input[0])
            yield (
                f"{count:,} {'tensor' if count == 1 else 'tensors'} ('{first}'{', …' if count > 1 else ''}) without "
                "captured input: the error of their weights counts, as if inputs were independent and equally large."
            )
        for name, count in self._unusable.items():
            yield f"{name} is not an option for {count:,} group(s): its error there is not finite."

    def _passes(self) -> Iterator[tuple[list[Plan], tuple[int, ...]]]:
        """Plan restricted to groups that can have the same formats, with the places of those formats."""
        patterns: dict[tuple[int, ...], set[str]] = {}
        for group in self._candidates.groups:
            which = formats_of(group, self._steps)
            patterns.setdefault(which, set()).update(info.name for info in group.tensors)
        for which, names in patterns.items():
            if which:
                yield [_restricted(self._candidates.plans[at], names) for at in which], which

    def _effect(self, name: str, at: int) -> Effect:
        stats = self._stats[name, at]
        noise, signal = self._outputs.get((name, at), (stats.noise, stats.signal))
        # An input of zeros says nothing: what remains is the error of the weights.
        if not signal > 0:
            noise, signal = stats.noise, stats.signal
        bits = bits_of(self._steps[at][name])
        if not noise:
            return Effect(bits, 0.0, math.inf)
        if not (signal > 0 and math.isfinite(noise)):
            return Effect(bits, math.inf, -math.inf)
        return Effect(bits, noise / signal, 10.0 * math.log10(signal / noise))


def _serves(name: str, format: str) -> bool:
    """Return whether a scale rule serves a format; an unknown one serves none."""
    rule = find_scale_rule(name)
    return rule is not None and rule in scale_rules(find_format(format))


def _by_name(plans: Sequence[Plan]) -> list[dict[str, TensorPlan]]:
    return [{planned.tensor.name: planned for planned in plan.tensors} for plan in plans]


def _restricted(plan: Plan, names: set[str]) -> Plan:
    """Return the plan for some tensors; the others are not quantized."""
    steps = (
        planned if planned.tensor.name in names else replace(planned, scheme=None, group=None)
        for planned in plan.tensors
    )
    return replace(plan, tensors=tuple(steps))


def _recipe(checkpoint: Checkpoint, candidates: Candidates, choices: Sequence[GroupChoice]) -> tuple[Options, Plan]:
    """Return the options that carry the choices out, and the plan they make: the format of most elements is that of
    all, and overrides name the others."""
    elements: Counter[str] = Counter()
    for choice in choices:
        elements[choice.option.name] += choice.group.elements
    formats = dict(zip(candidates.formats, candidates.plans, strict=True))
    usual = max(formats, key=lambda name: elements[name])
    overrides = [
        Override(selector, keep=True)
        if name == KEEP
        else Override(selector, name, rules=Rules(formats[name].options.rules.scale_rounding))
        for name in (*formats, KEEP)
        if name != usual
        for choice in choices
        if choice.option.name == name
        for selector in _selectors(checkpoint, choice.group)
    ]
    base = formats[usual].options
    options = replace(base, overrides=(*base.overrides, *overrides))
    if not any(elements[name] for name in formats):
        plan = candidates.plans[0]
        kept = tuple(replace(s, scheme=None, reason="kept: recommended") if s.scheme else s for s in plan.tensors)
        return options, replace(plan, options=options, tensors=kept, notes=())
    plan = make_plan(checkpoint, options)
    arrangement = arrange(checkpoint, plan)
    return resolved(checkpoint, plan), replace(plan, tensors=arrangement.tensors, notes=arrangement.notes)


def _stack_notes(plan: Plan) -> Iterator[str]:
    stacks = [s for s in plan.quantized if len(s.shape) > 2 and s.scheme and s.scheme.format.tensor_scale]
    if stacks:
        yield (
            f"{len(stacks):,} stacks of experts ('{printable(stacks[0].tensor.name)}', …) were measured with one "
            "tensor scale each; a layout that splits them gives each expert its own."
        )


def _selectors(checkpoint: Checkpoint, group: Group) -> list[str]:
    """Return the selectors of a group: its module where that holds nothing else that is quantized, else each tensor."""
    names = [info.name for info in group.tensors]
    if group.name.endswith(".experts"):
        selector = quoted_selector(group.name)
        if set(names_matching(selector, checkpoint.tensors)) == set(names):
            return [selector]
    return [quoted_selector(name) for name in names]
