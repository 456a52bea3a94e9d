"""Decisions on a model's layers: the plan that `mxcli quantize` makes for it, by the model's parameters, and the
schemes of the layers' inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxcli.errors import UsageError, printable
from mxcli.files.layouts import COLUMN
from mxcli.files.selection import Rule
from mxcli.flows.emulate.attention import takes_outputs_of_attention
from mxcli.flows.emulate.source import ModelSource, Place
from mxcli.flows.plan.overrides import Request, request_in, requests_for
from mxcli.flows.plan.plan import Options, Plan, TensorPlan, make_plan
from mxcli.flows.plan.recipe_file import RecipeFile, options_from, options_named, read_recipe
from mxcli.flows.write.arrange import layout_of
from mxcli.flows.write.split import pieces_of
from mxcli.numerics.formats import BlockFormat, find_format
from mxcli.numerics.scheme import RuleOptions, Scheme, resolve
from mxcli.numerics.streams import stream_of

if TYPE_CHECKING:
    import torch

SAME, NONE = "same", "none"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The request of a user: the format of weights, that of inputs (SAME, NONE or a name), a recipe, selectors, that of
    the outputs of attention (None: as other inputs), and further options by the fields of Options and RuleOptions."""

    format: str | None = None
    activations: str = SAME
    recipe: RecipeFile | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    outputs: str | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    def options(self) -> Options:
        """Return the options of the plan, with the defaults of `mxcli quantize`."""
        named = {"format": self.format, **self.others}
        rules = (*(Rule(True, one) for one in self.include), *(Rule(False, one) for one in self.exclude))
        defaults = {"nonfinite": "error", "on_indivisible": "error"}
        if self.recipe is not None:
            return options_from(self.recipe, named, rules, defaults=defaults)
        if self.format is None:
            raise UsageError("no format: name one (format='mxfp8'), a recipe or a training recipe.")
        return options_named({**defaults, **{key: one for key, one in named.items() if one is not None}}, rules)


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix, or stack of them, that is quantized as one: its name, scheme and random stream, and its part of a
    parameter. Parts with the same `shared` have one tensor scale."""

    name: str
    scheme: Scheme
    inputs: Scheme | None
    stream: int
    place: Place
    turned: bool
    expert: int | None = None
    rows: tuple[int, int] = (0, 0)
    shared: str | None = None

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor of the parameter's shape, as a view with blocks along its last dimension."""
        found = self.place.of(whole)
        found = found.transpose(-1, -2) if self.turned else found
        return found if self.expert is None else found[self.expert, slice(*self.rows)]

    def experts_in(self, shape: Sequence[int]) -> frozenset[int]:
        """Return the indices of the first dimension of a stack that the part is in."""
        import torch

        numbered = torch.arange(shape[0]).view(-1, *(1 for _ in shape[1:])).expand(*shape)
        found = self.of(numbered)
        return frozenset(found[(..., *(0 for _ in range(2)))].reshape(-1).tolist())


@dataclass(frozen=True, slots=True)
class Decided:
    """The plan, the parts by the name of their parameter, and the decision in words on each tensor of the files."""

    plan: Plan
    parts: Mapping[str, tuple[Part, ...]]
    scattered: tuple[str, ...]
    """Tensors of the files that are to be quantized, and are put together from several parameters."""


def parsed_recipe(recipe: str | Path | RecipeFile | None) -> RecipeFile | None:
    """Return a recipe that is named by its path, or given as it was read."""
    if recipe is None or isinstance(recipe, RecipeFile):
        return recipe
    if not isinstance(recipe, str | Path):
        raise UsageError(f"recipe {printable(repr(recipe))} is neither the path of a file nor a recipe that was read.")
    return read_recipe(recipe)


def texts(name: str, value: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return one selector or several as a tuple. Raises UsageError for anything but text."""
    found = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    wrong = next((one for one in found if not isinstance(one, str)), None)
    if wrong is not None:
        raise UsageError(f"{name} has {printable(repr(wrong))}: give selectors as text.")
    return found


def checked_format(name: str, value: str | None) -> str | None:
    """Return the name of a format as it was given. Raises UsageError for anything else."""
    if value is not None:
        if not isinstance(value, str):
            raise UsageError(f"{name} {printable(repr(value))}: give the name of a format.")
        find_format(value)
    return value


def decide(source: ModelSource, wanted: Wanted) -> Decided:
    """Return what is quantized of a model. Raises like `make_plan`, and UsageError for inputs in a format or under
    rules that mean nothing."""
    options = wanted.options()
    check_activations(wanted.activations)
    checkpoint = source.checkpoint
    plan = make_plan(checkpoint, options)
    requests, _ = requests_for(checkpoint.tensors, options.default_request, options.overrides)
    stated = wanted.others.get("nonfinite") or (wanted.recipe.named.get("nonfinite") if wanted.recipe else None)
    layout = layout_of(checkpoint, plan)
    found: dict[str, list[Part]] = {}
    scattered = []
    for planned in plan.quantized:
        place = source.places[planned.tensor.name]
        if place is None:
            scattered.append(planned.tensor.name)
            continue
        is_output = wanted.outputs is not None and takes_outputs_of_attention(planned.tensor.name)
        activations = str(wanted.outputs) if is_output else wanted.activations
        inputs = input_scheme(requests[planned.tensor.name], activations, stated or "saturate")
        pieces = pieces_of(planned, layout, checkpoint.config)
        found.setdefault(place.parameter, []).extend(
            [_whole(planned, inputs, place)]
            if isinstance(pieces, str) or pieces[0].expert is None
            else [
                Part(
                    piece.weight.name,
                    piece.weight.scheme,
                    inputs,
                    stream_of(piece.weight.name),
                    place,
                    planned.axis == COLUMN,
                    piece.expert,
                    (piece.begin, piece.end),
                    piece.shared,
                )
                for piece in pieces
            ]
        )
    if wanted.outputs is not None and not any(takes_outputs_of_attention(each.tensor.name) for each in plan.quantized):
        raise UsageError(
            f"outputs='{printable(wanted.outputs)}': no layer that attention ends with, such as o_proj, is quantized: "
            "leave outputs out."
        )
    return Decided(plan, {name: tuple(parts) for name, parts in found.items()}, tuple(scattered))


def _whole(planned: TensorPlan, inputs: Scheme | None, place: Place) -> Part:
    assert planned.scheme is not None
    name = planned.tensor.name
    return Part(name, planned.scheme, inputs, stream_of(name), place, planned.axis == COLUMN, shared=planned.group)


def check_activations(activations: str) -> None:
    """Raise UsageError unless `activations` is SAME, NONE or the name of a format."""
    if not isinstance(activations, str):
        raise UsageError(
            f"activations {printable(repr(activations))}: give '{SAME}', '{NONE}' or the name of a format."
        )
    if activations not in (SAME, NONE):
        find_format(activations)


def input_scheme(request: Request, activations: str, nonfinite: str) -> Scheme | None:
    """Return the scheme of the inputs of a layer whose weight is requested so; None for inputs that stay as they
    are."""
    if activations == NONE or request.format is None:
        return None
    if activations == SAME:
        wanted = Request(of_rows(request.format), request.rules)
    else:
        wanted = request_in(request, find_format(activations))
    assert wanted.format is not None
    return resolve(wanted.format, replace(wanted.rules, nonfinite=nonfinite))


def of_rows(fmt: BlockFormat) -> BlockFormat:
    """Return the format with blocks of one row, as inputs have them: tokens share no scale with other tokens, unless
    the whole tensor has one."""
    rows, columns = fmt.block
    if rows in (None, 1):
        return fmt
    parts = fmt.spelling.split(":")
    parts[2] = "channel" if columns is None else f"1x{columns}"
    return find_format(":".join(parts))


def named_options(rules: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return rules and other options by name, those that are not None. Raises TypeError for an unknown rule."""
    unknown = sorted(rules.keys() - RuleOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"unexpected keyword {unknown[0]!r}: rules are {', '.join(RuleOptions.__annotations__)}")
    return {name: value for name, value in {**rules, **others}.items() if value is not None}
