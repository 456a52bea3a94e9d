"""The linear layers of a model: which there are, what they are called, and which of them are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxcli.errors import RefusedError, UsageError, printable, together
from mxcli.files.roles import WEIGHT, tags_of
from mxcli.files.selection import matcher, suggestion
from mxcli.files.tensors import TensorInfo

if TYPE_CHECKING:
    import torch

DTYPES = {"torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
"""Types that are recorded, under their names in files."""
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARALLEL = ("DistributedDataParallel", "DataParallel")


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of modules that multiply by a matrix: how to know one, and its inputs and outputs. `turned` ones hold
    their weight as [in, out]."""

    name: str
    is_kind: Callable[[Any], bool]
    widths: Callable[[Any], tuple[int, int]]
    turned: bool = False


def _is_linear(module: Any) -> bool:
    import torch

    return isinstance(module, torch.nn.Linear)


def _is_conv1d(module: Any) -> bool:
    """By its name, so that transformers need not be there."""
    return any(
        each.__name__ == "Conv1D" and each.__module__.startswith("transformers.") for each in type(module).__mro__
    )


KINDS = (
    Kind("torch.nn.Linear", _is_linear, lambda module: (module.in_features, module.out_features)),
    Kind("transformers' Conv1D", _is_conv1d, lambda module: (module.nx, module.nf), turned=True),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer under its name in the checkpoint, of `inputs` and `outputs` features; `dtype` is its weight's
    safetensors type, or torch's word for one that no file holds."""

    name: str
    inputs: int
    outputs: int
    dtype: str
    module: Any = field(repr=False, compare=False)
    turned: bool = False

    @property
    def is_routed(self) -> bool:
        """Whether it is of an expert, which sees only those of the tokens that are sent to it."""
        return "expert" in tags_of(f"{self.name}.{WEIGHT}", WEIGHT)

    def weight(self) -> torch.Tensor:
        """[out, in], contiguous and in memory: the module's own bytes where they are that already.

        Raises RefusedError for a weight that is not whole and plain there.
        """
        weight = self.module.weight
        whole = weight.ndim == 2 and weight.numel() == self.inputs * self.outputs
        if not whole or weight.is_meta or hasattr(weight, "to_local") or self.dtype not in DTYPES.values():
            raise RefusedError(
                f"{printable(self.name)}: its weight is not there as a whole matrix of floats (it is quantized, "
                "sharded or offloaded); record activations and gradients only."
            )
        plain = weight.detach().t() if self.turned else weight.detach()
        return plain.cpu().contiguous()


def linear_layers(model: Any) -> list[Layer]:
    """The linear layers of a model in its order, each module once; raises RefusedError where there is none, or one that
    does not know its width yet."""
    import torch

    found = []
    for name, module in model.named_modules():
        kind = next((kind for kind in KINDS if kind.is_kind(module)), None)
        if kind is not None:
            if torch.nn.parameter.is_lazy(module.weight):
                raise RefusedError(
                    f"{printable(name)}: a {type(module).__name__} whose width its first input decides; run the model "
                    "once first."
                )
            inputs, outputs = kind.widths(module)
            dtype = str(getattr(module.weight, "dtype", None))
            known = DTYPES.get(dtype, dtype)
            found.append(Layer(_plain_name(model, name), inputs, outputs, known, module, kind.turned))
    if not found:
        kinds = " or ".join(kind.name for kind in KINDS)
        raise RefusedError(f"the model has no linear layers ({kinds}), so that there is nothing to capture.")
    return found


def chosen_layers(layers: Sequence[Layer], selectors: Sequence[str] | None) -> list[Layer]:
    """The layers that any of the selectors takes, as `--include` understands them; all without selectors.

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
    """Weights of three dimensions, such as those of experts kept together, which no linear layer holds."""
    return [name for name, weight in model.named_parameters() if weight.ndim == 3]


def is_compiled(model: Any) -> bool:
    """Whether torch.compile made it, or a part of it."""
    return any(
        "_orig_mod" in dict(module.named_children()) or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def _plain_name(model: Any, name: str) -> str:
    """The name without what wrappers add to it, as the checkpoint has it; a model that is a layer has its class's."""
    return ".".join(_without_wrappers(model, name.split("."))) if name else type(model).__name__.lower()


def _without_wrappers(model: Any, parts: list[str]) -> Iterator[str]:
    for part in parts:
        is_parallel = part == "module" and type(model).__name__ in _PARALLEL
        if not is_parallel and part not in _WRAPPERS:
            yield part
        model = model.get_submodule(part)
