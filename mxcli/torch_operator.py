"""Operator `torch.ops.mxcli.quantize_dequantize`, there once this module is imported: `mxcli.quantize_dequantize` as a
node of a graph, with gradients."""

from __future__ import annotations

from typing import Any, cast

import torch

from mxcli import api


def _values(
    x: torch.Tensor,
    format: str,
    axis: str = "row",
    on_indivisible: str = "pad",
    scale_rounding: str | None = None,
    rounding: str | None = None,
    dialect: str | None = None,
    nonfinite: str = "saturate",
    seed: int | None = None,
    hadamard: int | None = None,
    hadamard_seed: int | None = None,
    straight_through: bool = False,
) -> torch.Tensor:
    """Return the values that a tensor has in a format; arguments as in `mxcli.quantize_dequantize`.

    The gradient of x is that of the result with `straight_through`, else zero, as that of `torch.round` is.
    """
    made = api.quantize_dequantize(
        x,
        format,
        axis=axis,
        on_indivisible=on_indivisible,
        scale_rounding=scale_rounding,
        rounding=rounding,
        dialect=dialect,
        nonfinite=nonfinite,
        seed=seed,
        hadamard=hadamard,
        hadamard_seed=hadamard_seed,
    )
    return cast("torch.Tensor", made)


def _fake(x: torch.Tensor, *rules: Any, **named: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.straight_through = inputs[-1]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    of_x = gradient if ctx.straight_through else torch.zeros_like(gradient)
    return of_x, *(None for _ in range(11))


quantize_dequantize = torch.library.custom_op("mxcli::quantize_dequantize", _values, mutates_args=())
quantize_dequantize.register_fake(_fake)
quantize_dequantize.register_autograd(_backward, setup_context=_keep)
