"""The linear layers of a model: their names, shapes and selection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxcli.errors import RefusedError, UsageError, printable, together
from mxcli.files.roles import WEIGHT, tags_of
from mxcli.files.selection import matcher, suggestion
from mxcli.files.tensors import TensorInfo
from mxcli.flows.capture.weights import cached_weight, held_weight, unobserved, weight_dtype, whole_weight

if TYPE_CHECKING:
    import torch

DTYPES = {"torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
"""Recorded dtypes, with their names in files."""
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARALLEL = ("DistributedDataParallel", "DataParallel")


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A class of modules that multiply by a matrix: a test for it, and its numbers of inputs and outputs. `transposed`
    ones hold their weight as [in, out]."""

    name: str
    is_kind: Callable[[Any], bool]
    widths: Callable[[Any], tuple[int, int]]
    transposed: bool = False


def _is_linear(module: Any) -> bool:
    import torch

    return isinstance(module, torch.nn.Linear)


def _is_conv1d(module: Any) -> bool:
    """Return whether the module is a Conv1D, by class name: transformers may not be installed."""
    return any(
        each.__name__ == "Conv1D" and each.__module__.startswith("transformers.") for each in type(module).__mro__
    )


KINDS = (
    LayerKind("torch.nn.Linear", _is_linear, lambda module: (module.in_features, module.out_features)),
    LayerKind("transformers' Conv1D", _is_conv1d, lambda module: (module.nx, module.nf), transposed=True),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer under its name in the checkpoint, of `inputs` and `outputs` features; `dtype` is its weight's
    safetensors dtype, or torch's name for one that no file holds."""

    name: str
    inputs: int
    outputs: int
    dtype: str
    module: Any = field(repr=False, compare=False)
    transposed: bool = False

    @property
    def is_routed(self) -> bool:
        """Return whether it belongs to an expert, which sees only the tokens routed to it."""
        return "expert" in tags_of(f"{self.name}.{WEIGHT}", WEIGHT)

    def weight(self, computed: Any = None) -> torch.Tensor | None:
        """Return the weight that the layer holds, or else the one `computed` for its forward, as [out, in], a
        contiguous copy on the CPU. No code of the module runs.

        None for a weight that is not a whole and plain matrix of floats.
        """
        found = held_weight(self.module)
        if found is None:
            found = cached_weight(self.module) if computed is None else computed
        weight = whole_weight(found, self.inputs, self.outputs, transposed=self.transposed)
        return weight if weight is not None and str(weight.dtype) in DTYPES else None


def linear_layers(model: Any) -> list[Layer]:
    """Return the linear layers of a model in its order, each module once. Raises RefusedError if there is none, or one
    with an uninitialized width."""
    import torch

    found = []
    for name, module in model.named_modules():
        kind = next((kind for kind in KINDS if kind.is_kind(module)), None)
        if kind is not None:
            if torch.nn.parameter.is_lazy(held_weight(module)):
                raise RefusedError(
                    f"{printable(name)}: a {type(module).__name__} without a width before its first input; run the "
                    "model once first."
                )
            inputs, outputs = kind.widths(module)
            dtype = weight_dtype(module)
            known = DTYPES.get(dtype, dtype)
            found.append(Layer(_plain_name(model, name), inputs, outputs, known, module, kind.transposed))
    if not found:
        kinds = " or ".join(kind.name for kind in KINDS)
        raise RefusedError(f"the model has no linear layers ({kinds}): nothing to capture.")
    return found


def chosen_layers(layers: Sequence[Layer], selectors: Sequence[str] | None) -> list[Layer]:
    """Return the layers that any of the selectors takes, in the syntax of `--include`; all without selectors.

    Raises UsageError naming every selector that is invalid or takes nothing.
    """
    if selectors is None:
        return list(layers)
    weights = {
        f"{layer.name}.{WEIGHT}": TensorInfo(
            f"{layer.name}.{WEIGHT}", "F32", (layer.outputs, layer.inputs), WEIGHT, Path(), 0, 0
        )
        for layer in layers
    }
    problems, taken = [], set[str]()
    for selector in selectors:
        try:
            matches = matcher(selector)
        except ValueError as error:
            problems.append(f"--layers {printable(selector)}: {error}")
            continue
        found = {name for name, info in weights.items() if matches(info)}
        if not found:
            hint = suggestion(selector, weights)
            problems.append(f"--layers {printable(selector)}: matches no linear layer.{hint}")
        taken |= found
    if problems:
        raise together(UsageError, "--layers", problems)
    return [layer for layer in layers if f"{layer.name}.{WEIGHT}" in taken]


def stacked_weights(model: Any) -> list[str]:
    """Return the names of weights with three dimensions, such as stacked experts, which no linear layer holds."""
    with unobserved():
        return [name for name, weight in model.named_parameters() if weight.ndim == 3]


def is_compiled(model: Any) -> bool:
    """Return whether torch.compile made the model, or a part of it."""
    return any(
        "_orig_mod" in dict(module.named_children()) or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def _plain_name(model: Any, name: str) -> str:
    """Return the name without what wrappers add, as in the checkpoint; a model that is itself a layer has its class's
    name."""
    return ".".join(_without_wrappers(model, name.split("."))) if name else type(model).__name__.lower()


def _without_wrappers(model: Any, parts: list[str]) -> Iterator[str]:
    for part in parts:
        is_parallel = part == "module" and type(model).__name__ in _PARALLEL
        if not is_parallel and part not in _WRAPPERS:
            yield part
        model = model.get_submodule(part)
