"""The work of an emulation: the forward of every module that computes in another way, and what it does in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mxcli.errors import RefusedError, UsageError, printable, together
from mxcli.files.roles import WEIGHT
from mxcli.flows.emulate.binding import Holder, computed_weights, holders
from mxcli.flows.emulate.decisions import NONE, Decided, Part, Wanted, decide
from mxcli.flows.emulate.experts import DOWN, ExpertsState, Stack, experts_forward, first_of
from mxcli.flows.emulate.input_scales import InputScales, static_amaxes
from mxcli.flows.emulate.modules import LayerState
from mxcli.flows.emulate.operand import Devices
from mxcli.flows.emulate.products import Inputs, Quantizer
from mxcli.flows.emulate.source import ModelSource
from mxcli.flows.emulate.training import TrainedLayer
from mxcli.flows.emulate.weights import Held, SharedScales, WeightOperand
from mxcli.flows.products.trained_layers import blocks_of, high_notes
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.training import TrainingRecipe, find_training

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Work:
    """The forwards by module, what each layer does, why other tensors are kept, notes, and functions that forget the
    quantized weights."""

    forwards: tuple[tuple[Any, Forward], ...]
    layers: Mapping[str, str]
    kept: Mapping[str, str]
    notes: tuple[str, ...]
    forget: tuple[Callable[[], None], ...] = ()


@dataclass(frozen=True, slots=True)
class _Bound:
    """A parameter with parts to quantize: its name, and the modules that hold it."""

    name: str
    holders: tuple[Holder, ...]
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return tuple(_held(self).tensor.shape)

    @property
    def layer(self) -> str:
        """The layer by its name in files."""
        return _layer(self.parts[0].name)


def formats_work(
    model: Any, source: ModelSource, wanted: Wanted, devices: Devices, input_scales: InputScales | None = None
) -> Work:
    """Return the work of a format or recipe. Raises RefusedError with all layers that cannot be emulated."""
    decided = decide(source, wanted)
    static = static_amaxes(input_scales, decided, source.checkpoint.config)
    bound = _bound(model, source, decided)
    scales = SharedScales(((_held(one), part) for one in bound for part in one.parts), devices)
    operands = {one.name: WeightOperand(_held(one), one.parts, scales, devices) for one in bound}

    quantizer = Quantizer(devices)

    def state(one: _Bound, name: str) -> LayerState:
        inputs = Inputs(name, one.parts[0].inputs, static.get(one.parts[0].name))
        return LayerState(operands[one.name], inputs, quantizer)

    def stack(one: _Bound) -> Stack:
        return Stack(one.name, operands[one.name], _expert_inputs(one, static))

    forwards = _forwards(bound, quantizer, state, stack)
    layers = {label: _words(one.parts) for one in bound for label in _labels(model, one)}
    forget = (scales.forget, *(operand.forget for operand in operands.values()))
    return Work(forwards, layers, _kept(decided), decided.plan.notes, forget)


def training_work(model: Any, source: ModelSource, wanted: Wanted, training: str, devices: Devices) -> Work:
    """Return the work of a training recipe. Raises UsageError for an unknown name, and RefusedError with all layers
    that cannot be emulated."""
    recipe = _one_recipe(training)
    seed = wanted.others.get("seed") or 0
    others = {"on_indivisible": "pad", **{key: one for key, one in wanted.others.items() if key != "seed"}}
    decided = decide(source, replace(wanted, format=_any_format(recipe), activations=NONE, others=others))
    bound = _bound(model, source, decided)
    problems = [
        f"{printable(one.name)}: a table of embeddings has no products: leave it out of include."
        for one in bound
        if any(holder.kind is not None and not holder.kind.has_products for holder in one.holders)
    ]
    if problems:
        raise together(RefusedError, "Tables in training", problems)
    tensors = source.checkpoint.tensors.values()
    blocks = blocks_of([_layer(info.name) for info in tensors if info.role == WEIGHT and len(info.shape) > 1])
    high = blocks.high(recipe)
    quantized = [one for one in bound if blocks.of.get(one.layer) not in high]
    trained: list[TrainedLayer] = []

    def layer(name: str) -> TrainedLayer:
        trained.append(TrainedLayer(name, recipe, devices, seed))
        return trained[-1]

    def state(one: _Bound, name: str) -> LayerState:
        return LayerState(None, Inputs(), Quantizer(devices), trained=layer(one.layer))

    def stack(one: _Bound) -> Stack:
        return Stack(one.name, trained={at: layer(f"{one.name}.{at}") for at in range(one.shape[0])})

    forwards = _forwards(quantized, Quantizer(devices), state, stack)
    words = {one.name: recipe.name if one in quantized else f"high under {recipe.name}" for one in bound}
    layers = {label: words[one.name] for one in bound for label in _labels(model, one)}
    notes = tuple(high_notes([recipe], blocks, [one.layer for one in bound]))
    return Work(forwards, layers, _kept(decided), notes, tuple(each.forget for each in trained))


def with_cache(work: Work, forwards: Iterable[tuple[Any, str, Forward]], scheme: Scheme) -> Work:
    """Return the work with keys and values quantized as well."""
    found = list(forwards)
    layers = {name: f"keys and values {scheme.format.name}" for _, name, _ in found}
    return replace(
        work,
        forwards=(*work.forwards, *((module, forward) for module, _, forward in found)),
        layers={**work.layers, **layers},
    )


def _forwards(
    bound: Sequence[_Bound],
    quantizer: Quantizer,
    state: Callable[[_Bound, str], LayerState],
    stack: Callable[[_Bound], Stack],
) -> tuple[tuple[Any, Forward], ...]:
    """Return the forward of every module: of a layer by its `state`, of experts by the `stack` of each parameter."""
    found: list[tuple[Any, Forward]] = []
    modules: dict[int, Any] = {}
    stacks: dict[int, dict[str, Stack]] = {}
    for one in bound:
        for holder in one.holders:
            if holder.kind is not None:
                found.append((holder.module, holder.kind.forward(state(one, holder.name))))
            else:
                modules[id(holder.module)] = holder.module
                stacks.setdefault(id(holder.module), {})[holder.attribute] = stack(one)
    for key, module in modules.items():
        # A stack without parts stays as it is.
        whole = {name: stacks[key].get(name, Stack(name)) for name in (first_of(module), DOWN)}
        found.append((module, experts_forward(module, ExpertsState(whole, quantizer))))
    return tuple(found)


def _labels(model: Any, one: _Bound) -> Iterator[str]:
    """Yield the names of the layers that compute with a parameter: that of the module, of experts also the stack's."""
    for holder in one.holders:
        name = holder.name or type(model).__name__
        yield name if holder.kind is not None else f"{name}.{holder.attribute}"


def _layer(name: str) -> str:
    return name.removesuffix(f".{WEIGHT}")


def _one_recipe(training: str) -> TrainingRecipe:
    found = find_training(training) if isinstance(training, str) else []
    if len(found) != 1:
        raise UsageError(f"training {printable(repr(training))}: name one training recipe.")
    return found[0]


def _any_format(recipe: TrainingRecipe) -> str:
    """Return a format that takes the linear layers into the plan; the recipe says which one each operand has."""
    return next(operand.format for operand in recipe.fprop if operand is not None)


def _bound(model: Any, source: ModelSource, decided: Decided) -> list[_Bound]:
    """Return the parameters to quantize with the modules that compute with them. Raises RefusedError with all that
    cannot be emulated."""
    by_parameter = holders(model)
    problems = [
        f"{printable(name)}: is put together from several parameters of the model, which is not emulated: exclude it."
        for name in decided.scattered
    ]
    problems += [
        f"{printable(name)}: its weight is computed by a parametrization, which is not emulated: remove it "
        "(torch.nn.utils.parametrize.remove_parametrizations)."
        for name in computed_weights(model)
    ]
    found, seen = list[_Bound](), set[int]()
    for name, parts in decided.parts.items():
        identity = id(source.parameters[name])
        held = by_parameter.get(identity, [])
        problems += _problems(name, parts, held)
        if held and identity not in seen:  # a module may be in a model under several names
            seen.add(identity)
            found.append(_Bound(name, tuple(held), parts))
    if problems:
        raise together(RefusedError, "Layers that cannot be emulated", problems)
    return found


def _problems(name: str, parts: Sequence[Part], held: Sequence[Holder]) -> Iterator[str]:
    """Yield why a parameter cannot be emulated."""
    what = f"exclude it (exclude='{printable(parts[0].name)}')" if len(parts) == 1 else "exclude it"
    if not held:
        yield f"{printable(name)}: no module holds it as a parameter: {what}."
    for holder in held:
        parameter = getattr(holder.module, holder.attribute)
        if holder.why:
            yield f"{printable(name)}: {holder.why}: {what}."
        elif not _is_plain(parameter):
            yield f"{printable(name)}: is a {type(parameter).__name__}, not a plain tensor: {what}."
        elif holder.kind is None and holder.attribute not in (first_of(holder.module), DOWN):
            yield f"{printable(name)}: how a {type(holder.module).__name__} computes with it is not known: {what}."
        elif _several_inputs(parts, tuple(parameter.shape), is_stack=holder.kind is None):
            yield (
                f"{printable(name)}: its matrices have one input, and their formats would quantize it in several ways: "
                "give them one format, or activations='none'."
            )


def _is_plain(parameter: Any) -> bool:
    import torch

    kind = type(parameter)
    return kind in (torch.Tensor, torch.nn.Parameter) and parameter.layout is torch.strided


def _several_inputs(parts: Sequence[Part], shape: tuple[int, ...], *, is_stack: bool) -> bool:
    """Return whether parts of one matrix request several schemes of its inputs."""
    if not is_stack:
        return len({part.inputs for part in parts}) > 1
    found: dict[int, set[Scheme | None]] = {}
    for part in parts:
        for expert in part.experts_in(shape):
            found.setdefault(expert, set()).add(part.inputs)
    return any(len(schemes) > 1 for schemes in found.values())


def _expert_inputs(one: _Bound, static: Mapping[str, float]) -> dict[int, Inputs]:
    """Return the inputs of each expert; of several static scales, as of gate and up, the largest one."""
    found: dict[int, Inputs] = {}
    for part in one.parts:
        amax = static.get(part.name)
        for expert in part.experts_in(one.shape):
            known = found.get(expert, Inputs()).amax
            both = [each for each in (known, amax) if each is not None]
            found[expert] = Inputs(f"{one.name}.{expert}", part.inputs, max(both, default=None))
    return found


def _held(one: _Bound) -> Held:
    return Held(one.holders[0].module, one.holders[0].attribute)


def _kept(decided: Decided) -> dict[str, str]:
    return {planned.tensor.name: planned.reason for planned in decided.plan.tensors if planned.scheme is None}


def _words(parts: Sequence[Part]) -> str:
    """Return what a layer does: `weights mxfp8_e4m3, inputs nvfp4`."""
    weights = " and ".join(dict.fromkeys(part.scheme.format.name for part in parts))
    inputs = " and ".join(dict.fromkeys(part.inputs.format.name if part.inputs else "as they are" for part in parts))
    return f"weights {weights}, inputs {inputs}"
