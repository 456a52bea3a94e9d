"""The three products of a layer in training, their operands quantized as a row of the training recipes says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from mxcli.flows.emulate.operand import Devices, amax_of, product_dtype, quantized
from mxcli.flows.emulate.products import linear
from mxcli.flows.emulate.weights import Identity, identity
from mxcli.flows.products.shapes import DGRAD, DY, FPROP, OPERANDS, WGRAD, W, X
from mxcli.numerics.formats import find_format
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.streams import stream_of
from mxcli.numerics.training import Operand, TrainingRecipe, delayed_amax, rules_of

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class TrainedLayer:
    """A layer under a training recipe: its name, the recipe, the seed of stochastic rounding, its calls so far, and the
    amaxes of each operand in them where scales are delayed."""

    name: str
    recipe: TrainingRecipe
    devices: Devices
    seed: int = 0
    calls: int = 0
    earlier: dict[str, list[float]] = field(default_factory=lambda: {X: [], W: [], DY: []})
    _weights: dict[str, tuple[Identity, torch.Tensor]] = field(default_factory=dict)

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + b for a weight [out, in], in the dtype of x, with the gradients of the recipe."""
        import torch

        rows = x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            call, self.calls = self.calls, self.calls + 1
            found: torch.Tensor = _products().apply(rows, weight, bias, self, call)
        else:
            found = self.of_pass(FPROP, {X: rows, W: weight}, self.calls, self.earlier, bias)
        return found.reshape(*x.shape[:-1], weight.shape[0]).to(x.dtype)

    def of_pass(
        self,
        passes: str,
        operands: Mapping[str, torch.Tensor],
        call: int,
        earlier: Mapping[str, Sequence[float]],
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return one product of the tensors X, W and dY, by letter, and the bias added; `earlier` has the amaxes of the
        calls before."""
        pair = self.recipe.pairs[passes]
        schemes = tuple(None if how is None else rules_of(how, self.seed) for how in pair)
        dtype = product_dtype(next(iter(operands.values())).dtype, schemes)
        sides = []
        for (letter, turned), how, scheme in zip(OPERANDS[passes], pair, schemes, strict=True):
            plain = operands[letter].detach()
            plain = plain.t() if turned else plain
            amax = None if how is None else _delayed(how, earlier[letter])
            stream = stream_of(f"{self.name}.{letter}.{passes}.{call}.None")
            sides.append(self._side((letter, passes), plain, (how, scheme), dtype, (amax, stream)))
        return linear(sides[0], sides[1], bias, dtype)

    def remember(self, letter: str, tensor: torch.Tensor) -> None:
        """Add the amax of an operand to its history, if scales are delayed."""
        history = self.recipe.history
        if history is not None:
            known = self.earlier[letter]
            known.append(amax_of(tensor.detach(), self.devices).value)
            del known[: -history.length]

    def forget(self) -> None:
        """Forget the quantized weights; histories stay."""
        self._weights = {}

    def _side(
        self,
        place: tuple[str, str],
        plain: torch.Tensor,
        manner: tuple[Operand | None, Scheme | None],
        dtype: torch.dtype,
        draw: tuple[float | None, int],
    ) -> torch.Tensor:
        """Return an operand [rows, k] of a `place` (letter and pass); a weight whose rounding is not random, as it was
        quantized before. `draw` is the amax of a delayed scale and the random stream."""
        (letter, passes), (how, scheme), (amax, stream) = place, manner, draw
        if how is None or scheme is None:
            return plain.to(dtype)
        now = (*identity(plain), dtype, amax)
        known = self._weights.get(passes) if letter == W and not how.is_random else None
        if known is not None and known[0] == now:
            return known[1]
        made = quantized(_completed(plain, how), scheme, self.devices, dtype, tensor_amax=amax, stream=stream)
        if letter == W and not how.is_random:
            self._weights[passes] = now, made
        return made


def _delayed(how: Operand, earlier: Sequence[float]) -> float | None:
    """Return the amax that a delayed scale is made from; None for a scale of the operand itself."""
    if how.history is None:
        return None
    return delayed_amax(earlier, find_format(how.format).element, how.history)


def _completed(plain: torch.Tensor, how: Operand) -> torch.Tensor:
    """Return an operand with zeros added to the dimension that its product sums over, up to whole transforms."""
    import torch

    missing = -plain.shape[-1] % (how.hadamard or 1)
    return torch.nn.functional.pad(plain, (0, missing)) if missing else plain


@cache
def _products() -> Any:
    """Return the function of autograd with the three products of a layer."""
    import torch

    class Products(torch.autograd.Function):  # type: ignore[misc]
        """x W^T, with dY W and dY^T x as gradients, each of operands of its own."""

        @staticmethod
        def forward(
            ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: TrainedLayer, call: int
        ) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            ctx.bias_dtype = None if bias is None else bias.dtype
            ctx.layer, ctx.call = layer, call
            ctx.earlier = {letter: tuple(known) for letter, known in layer.earlier.items()}
            found = layer.of_pass(FPROP, {X: x, W: weight}, call, ctx.earlier, bias)
            layer.remember(X, x)
            layer.remember(W, weight)
            return found

        @staticmethod
        @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            x, weight = ctx.saved_tensors
            layer, dy = ctx.layer, gradients[0].to(x.dtype)
            operands, earlier = {DY: dy, X: x, W: weight}, {**ctx.earlier, DY: layer.earlier[DY]}
            needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
            dx = layer.of_pass(DGRAD, operands, ctx.call, earlier).to(x.dtype) if needs_x else None
            dw = layer.of_pass(WGRAD, operands, ctx.call, earlier).to(weight.dtype) if needs_weight else None
            db = (
                dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(ctx.bias_dtype) if needs_bias else None
            )
            layer.remember(DY, dy)
            return dx, dw, db, None, None

    return Products
