"""`mxcli.emulate`: a model of torch whose linear layers compute as a format, a recipe or a training recipe says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from mxcli.backends import check_device
from mxcli.errors import RefusedError, UsageError, import_extra, printable
from mxcli.flows.emulate.attention import cache_forwards, cache_scheme
from mxcli.flows.emulate.build import Work, formats_work, training_work, with_cache
from mxcli.flows.emulate.decisions import SAME, Wanted, checked_format, named_options, parsed_recipe, texts
from mxcli.flows.emulate.input_scales import InputScales
from mxcli.flows.emulate.modules import exchange, give_back, is_emulated
from mxcli.flows.emulate.operand import Devices
from mxcli.flows.emulate.source import ModelSource, source_of
from mxcli.flows.plan.recipe_file import RecipeFile
from mxcli.numerics.scheme import RuleOptions

if TYPE_CHECKING:
    import torch

_COMPILED = "compiled code (torch.compile) runs uncompiled meanwhile"


class Emulation:
    """A model that is emulated until `remove`; also a context manager.

    `layers` has what each layer does, by its name in the model; `kept` why each other tensor of the model's files is
    left as it is; `notes` are sentences about anything odd.
    """

    def __init__(self, model: Any, work: Work) -> None:
        self.layers: Mapping[str, str] = work.layers
        self.kept: Mapping[str, str] = work.kept
        self.notes: tuple[str, ...] = work.notes
        self._forget = work.forget
        self._forwards, self._model = work.forwards, model
        self._stack = ExitStack()
        try:
            for module, forward in work.forwards:
                exchange(module, forward)
                self._stack.callback(give_back, module)
            if _is_compiled(model):
                self._stack.enter_context(_uncompiled())
                self.notes = (*self.notes, _COMPILED)
        except BaseException:
            self._stack.close()
            raise

    def refresh(self) -> None:
        """Quantize all weights again at their next use. Needed only after changes that torch does not count: those in
        place through `.data` or through memory that is shared with another program."""
        for forget in self._forget:
            forget()

    @contextmanager
    def only(self, layers: Iterable[str]) -> Iterator[None]:
        """Let only these layers, by their names in the model, compute as emulated until the end of the `with` block."""
        kept = {id(_module_of(_unwrapped(self._model), name)) for name in layers}
        others = [(module, forward) for module, forward in self._forwards if id(module) not in kept]
        for module, _ in others:
            give_back(module)
        try:
            yield
        finally:
            for module, forward in others:
                exchange(module, forward)

    def remove(self) -> None:
        """Give the model back as it was. May be called several times."""
        self._stack.close()

    def __enter__(self) -> Emulation:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"Emulation({len(self.layers):,} layers)"


def emulate(
    model: torch.nn.Module,
    *,
    format: str | None = None,
    activations: str = SAME,
    recipe: str | Path | RecipeFile | None = None,
    training: str | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    input_scales: InputScales | None = None,
    outputs: str | None = None,
    kv_cache: str | None = None,
    on_indivisible: str | None = None,
    layout: str | None = None,
    fuse: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    **rules: Unpack[RuleOptions],
) -> Emulation:
    """Make the linear layers of a model compute as a format, a recipe or a training recipe says, until `remove` of what
    is returned, or the end of its `with` block.

    `format` is that of weights, with the plan that `mxcli quantize` makes for this model: the same layers by default,
    heads, routers and embeddings kept, and one tensor scale for fused layers. `recipe` is a recipe file for it.
    `include`, `exclude`, `on_indivisible`, `layout` and `fuse` are the options of `mxcli quantize`, and `rules` those
    of `mxcli.quantize`; selectors match the names that the model's files have. `activations` is the format of inputs:
    "same" as the weight of their layer (in blocks of one row), "none", or another one. They are quantized in every
    call along the dimension that the layer sums over; a format with a scale of the whole tensor takes the amax of that
    call.

    Operands are bit for bit those of `mxcli.quantize` and its `dequantize`. Products are torch's, of operands in
    float32, and the result is rounded to the dtype of the model; a bfloat16 model computes in bfloat16 where every
    value of both operands is exact in it (MX formats), and a float64 model in float64. Under autocast inputs are
    rounded to its dtype first, and weights are quantized as the model holds them. Gradients pass straight through the
    rounding, to inputs and weights.

    `input_scales` makes scales of the whole tensor static: a mapping of layers to the factors that scale codes back, or
    a directory of captured inputs; layers without one keep the amax of the call. `outputs` is the format of the outputs
    of attention, which are the inputs of the layer that it ends with, instead of `activations`. `kv_cache` is that of
    keys and values, along the features of a head, in attention of transformers: rounded to the model's dtype, as they
    are put into any cache, and also without one.

    `training` names a training recipe instead (`mxcli explain` lists them): forward and both gradients are products of
    operands that are each quantized as it says; in the blocks that stay high, and all other layers, they are exact.
    Tokens are completed with zeros up to whole transforms. A call draws other random numbers than the call before, by
    `seed`.

    Weights are quantized at their first use, and again when they change as torch counts it (an optimizer's step,
    another tensor); `refresh` makes it so after other changes. Parameters, state_dict, copies and pickles of the model
    are those of the plain model. Compiled code runs uncompiled meanwhile.

    Raises UsageError for names that mean nothing, and RefusedError for a model without layers to quantize, on the
    device meta, quantized or emulated already, and for layers that cannot be emulated, by name.
    """
    import_extra("torch", "emulating a format")
    inner = _unwrapped(model)
    if device is not None:
        check_device(str(device))
    devices = Devices(None if device is None else str(device), threads)
    others = {"on_indivisible": on_indivisible, "layout": layout, "fuse": fuse}
    named = named_options(rules, others)
    selectors = texts("include", include), texts("exclude", exclude)
    wanted = Wanted(format, activations, parsed_recipe(recipe), *selectors, checked_format("outputs", outputs), named)
    _check_together(wanted, training, {**rules, "input_scales": input_scales})
    cached = None if kv_cache is None else cache_scheme(kv_cache, rules)
    _check_model(inner)
    source = source_of(inner)
    _refuse_meta(inner, source)
    if training is None:
        work = formats_work(inner, source, wanted, devices, input_scales)
    else:
        work = training_work(inner, source, wanted, training, devices)
    if cached is not None:
        work = with_cache(work, cache_forwards(inner, cached, devices), cached)
    return Emulation(model, work)


def _check_together(wanted: Wanted, training: str | None, rules: Mapping[str, Any]) -> None:
    """Raise UsageError for requests that exclude each other."""
    if training is None:
        return
    given = {"format": wanted.format, "recipe": wanted.recipe, **{name: rules.get(name) for name in rules}}
    given["outputs"] = wanted.outputs
    given["activations"] = None if wanted.activations == SAME else wanted.activations
    for name, value in given.items():
        if value is not None and name != "seed":
            raise UsageError(f"training='{printable(training)}' says how every operand is quantized: leave {name} out.")


def _check_model(model: Any) -> None:
    already = [name for name, module in model.named_modules() if is_emulated(module)]
    if already:
        raise RefusedError(
            f"{type(model).__name__}: is emulated already ({printable(already[0])}): call remove() of that emulation "
            "first."
        )


def _refuse_meta(model: Any, source: ModelSource) -> None:
    absent = [name for name, tensor in source.parameters.items() if tensor.is_meta]
    if absent:
        raise RefusedError(
            f"{type(model).__name__}: {printable(absent[0])} is on the device meta, without values: load the model's "
            "weights into memory or onto a GPU first."
        )


def _unwrapped(model: Any) -> Any:
    """Return the model in wrappers of torch. Raises UsageError for anything but a module."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"a {type(model).__name__} is not a torch.nn.Module: give the model to emulate.")
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            inner = model.module
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def _module_of(model: Any, layer: str) -> Any:
    """Return the module of a layer; that of a stack of experts holds the parameter that the layer is named by."""
    import torch

    parent, _, last = layer.rpartition(".")
    owner = model.get_submodule(parent)
    found = getattr(owner, last, None)
    return found if isinstance(found, torch.nn.Module) else owner


def _is_compiled(model: Any) -> bool:
    return any(
        "_orig_mod" in dict(module.named_children()) or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def _uncompiled() -> Any:
    """Return a context in which compiled code runs uncompiled."""
    import torch

    return torch.compiler.set_stance("force_eager")
