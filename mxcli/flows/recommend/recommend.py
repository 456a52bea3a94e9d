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
from mxcli.flows.plan.plan import Options, Plan, TensorPlan, make_plan
from mxcli.flows.plan.recipe_text import spelled_format
from mxcli.flows.products.loss_error import CapturedGradients, served
from mxcli.flows.products.output_error import MOST_ROWS, CapturedInputs
from mxcli.flows.recommend.baselines import Baseline, baselines
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
from mxcli.flows.recommend.recipe import recipe_of
from mxcli.flows.write.arrange import arrange
from mxcli.numerics.formats import find_format
from mxcli.numerics.metrics import LOSS, OUTPUT_ERROR, WEIGHT_ERROR, Objective
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
    `smallest_harm` is the objective where every group has its smallest option, and `baselines` are simple choices
    within the target. `recipe` are the options that
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
    baselines: tuple[Baseline, ...]
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
    gradients: CapturedGradients | None = None,
    on_tensor: Progress = lambda info: None,
) -> Recommendation:
    """Measure every tensor under every format and choose; each is read once, or twice where inputs were captured.

    With `gradients`, which must be of all tensors (`gradients_for`), harm is the estimated change of the loss.

    `on_tensor` is called with each as it is done. Raises RefusedError for values that are not finite, if the options
    refuse them, and for a target that cannot be reached.
    """
    if inputs is not None:
        import_extra("torch", "weighing errors with captured inputs")
        inputs.check([planned for steps in _by_name(candidates.plans)[:1] for planned in steps.values()])
    measured = _Measured(checkpoint, candidates, backend, inputs, gradients)
    measured.run(on_tensor)
    options = [measured.options(group) for group in candidates.groups]
    best = choose(candidates.target, candidates.groups, options)
    choices = tuple(
        GroupChoice(group, each, at) for group, each, at in zip(candidates.groups, options, best.chosen, strict=True)
    )
    smallest = [min(each, key=lambda option: option.bits) for each in options]
    formats = dict(zip(candidates.formats, candidates.plans, strict=True))
    recipe, plan = recipe_of(checkpoint, formats, [(choice.group, choice.option.name) for choice in choices])
    infos = checkpoint.tensors.values()
    return Recommendation(
        source=source,
        total=Total.of(infos),
        by_dtype=totals_by(lambda info: info.dtype, infos),
        formats=candidates.formats,
        target=candidates.target,
        objective=objective_of(inputs, gradients),
        choices=choices,
        harm=math.fsum(choice.option.harm for choice in choices),
        bound=best.bound,
        exact=best.exact,
        smallest_harm=math.fsum(option.harm for option in smallest),
        baselines=baselines(candidates.target, candidates.groups, options),
        recipe=recipe,
        plan=plan,
        report=measured.report(source, plan),
        notes=tuple(dict.fromkeys([*checkpoint.notes, *plan.notes, *measured.notes(), *_stack_notes(plan)])),
    )


def objective_of(inputs: CapturedInputs | None, gradients: CapturedGradients | None = None) -> Objective:
    """Return the objective: the error of weights, of outputs where inputs were captured, or of the loss where gradients
    were too."""
    if gradients is not None:
        return LOSS
    return WEIGHT_ERROR if inputs is None else OUTPUT_ERROR


def gradients_for(candidates: Candidates, captures: Checkpoint) -> CapturedGradients | None:
    """Return the captured inputs and gradients if those of every tensor that is chosen for are there, else None."""
    gradients = CapturedGradients(captures)
    chosen = {info.name for group in candidates.groups for info in group.tensors}
    planned = [step for name, step in _by_name(candidates.plans)[0].items() if name in chosen]
    return gradients if served(gradients, planned) else None


class _Measured:
    """The effects of formats on tensors: statistics, and with captured inputs the error of outputs."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        candidates: Candidates,
        backend: Backend,
        inputs: CapturedInputs | None,
        gradients: CapturedGradients | None = None,
    ) -> None:
        self._checkpoint, self._candidates, self._backend, self._inputs = checkpoint, candidates, backend, inputs
        self._gradients = gradients
        self._losses: dict[tuple[str, int], float] = {}
        self._steps = _by_name(candidates.plans)
        self._stats: dict[tuple[str, int], Stats] = {}
        self._outputs: dict[tuple[str, int], tuple[float, float]] = {}
        self._unusable = Counter[str]()
        self._without_input = list[str]()

    def run(self, on_tensor: Progress) -> None:
        """Measure everything; groups that can have the same formats go together, so that each tensor is read once."""
        refusals: list[str] = []
        for plans, which in self._passes():
            captured = self._inputs is not None or self._gradients is not None
            for steps, made in measure(self._checkpoint, plans, self._backend, codes=captured):
                info = steps[0].tensor
                for at, quantized in zip(which, made, strict=True):
                    assert quantized.stats is not None
                    self._stats[info.name, at] = quantized.stats
                refusals += nonfinite_refusals(steps[0], self._stats[info.name, which[0]])
                if self._gradients is not None:
                    changes = self._gradients.changes(self._checkpoint, steps[0], made, self._backend)
                    self._losses |= {(info.name, at): change for at, change in zip(which, changes, strict=True)}
                elif self._inputs is not None and self._inputs.has(steps[0]):
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
        harm = self._losses.get((name, at), noise / signal)
        return Effect(bits, harm, 10.0 * math.log10(signal / noise))


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


def _stack_notes(plan: Plan) -> Iterator[str]:
    stacks = [s for s in plan.quantized if len(s.shape) > 2 and s.scheme and s.scheme.format.tensor_scale]
    if stacks:
        yield (
            f"{len(stacks):,} stacks of experts ('{printable(stacks[0].tensor.name)}', …) were measured with one "
            "tensor scale each; a layout that splits them gives each expert its own."
        )
