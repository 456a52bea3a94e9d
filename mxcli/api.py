"""The functions of `import mxcli`: torch tensors or numpy arrays in, the same kind out."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from numbers import Integral
from typing import TYPE_CHECKING, Any, Unpack, cast

import numpy as np

from mxcli.backends import AUTO, CPU, CUDA, choose_backend, open_resident, unpacked
from mxcli.backends.backend import Backend
from mxcli.backends.given import (
    beyond_binary32,
    check_plain,
    dtype_name,
    elements_of,
    plain_array,
    result_for,
    torch_tensor,
)
from mxcli.backends.reencode import reencode
from mxcli.errors import RefusedError, UsageError, printable
from mxcli.files import packing
from mxcli.flows.capture.capture import capture as capture
from mxcli.flows.emulate.emulate import emulate as emulate
from mxcli.flows.evaluate.any_model import evaluate as evaluate
from mxcli.flows.measure.nonfinite import nonfinite_values
from mxcli.numerics.blocks import BOTH, COLUMN, ROW, Quantized, axes_of, divides
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.metric_formulas import Value
from mxcli.numerics.metrics import measured
from mxcli.numerics.reencodings import find_reencoding
from mxcli.numerics.scheme import NONFINITE_POLICIES, RuleOptions, Scheme, resolve, rules_from

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch

    Tensor: TypeAlias = "torch.Tensor | np.ndarray[Any, Any]"

_SCALE_DTYPES = ("uint8", "float8_e8m0fnu", "float8_e4m3fn")
_MOST_THREADS = 1024
_BEYOND = "beyond binary32's range (3.4e38)"
_NAMES = ("scale_rounding", "rounding", "dialect")
"""Rules given by name, or None."""


class QuantizedTensor:
    """A quantized tensor: codes, scales, and what they stand for.

    Arrays are torch tensors where the input was one, else numpy arrays. Along axis "column" `packed` and `scales` are
    those of the input with its last two dimensions exchanged, as matrix products take them; codes and values have the
    input's shape.
    """

    def __init__(self, quantized: Quantized, *, as_torch: bool, backend: Backend, axis: str = ROW) -> None:
        self._q, self._as_torch, self._backend, self._axis = quantized, as_torch, backend, axis

    @property
    def format(self) -> BlockFormat:
        """The row of the format."""
        return self._q.format

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the input."""
        return _exchanged_shape(self._q.shape) if self._axis == COLUMN else self._q.shape

    @property
    def axis(self) -> str:
        """The axis that blocks run along: "row" (the last dimension) or "column" (the one before it)."""
        return self._axis

    @property
    def codes(self) -> Tensor:
        """uint8, one code per element in the low bits, shape of the input."""
        return self._turned_back(unpacked(self._q))

    @property
    def packed(self) -> Tensor:
        """uint8, codes as stored: two 4-bit codes per byte (element 0 low), four 6-bit codes in three bytes."""
        return self._out(self._q.packed)

    @property
    def scales(self) -> Tensor:
        """uint8 codes (E8M0, E4M3) or float32, one per block: a grid over the last two dimensions."""
        return self._out(self._q.scales)

    @property
    def row_scales(self) -> Tensor:
        """The scales of blocks of one row, for products that take no others: those of a 2-D block repeated for each of
        its rows (NVFP4 paper, section 4.3); as `scales` where blocks have one row."""
        height = self.format.block[0]
        if height is None:
            raise UsageError(f"{self.format.name} has no scales of single rows: its blocks are of all rows")
        rows = self._q.shape[-2] if len(self._q.shape) > 1 else 1
        return self._out(self._q.scales.repeat(height, axis=-2)[..., :rows, :] if height > 1 else self._q.scales)

    @property
    def tensor_scale(self) -> float | None:
        """The decode scale of the whole tensor: x ~ code value * scale * tensor_scale; None without one."""
        return self._q.tensor_scale

    def dequantize(self) -> Tensor:
        """Return the values as float32, in the shape of the input; a Hadamard transform is undone."""
        return self._turned_back(self._backend.dequantize(self._q))

    def reencode(self, target: str) -> tuple[QuantizedTensor, int]:
        """Return the same values as FP8 E4M3 under scales per "row" or per "1x128" elements, and the number of
        elements that changed (0: the operands are identical). Raises UsageError for scales that are not powers of
        two, and for a tensor whose codes stand for transformed values."""
        if self._q.scheme.hadamard is not None:
            raise UsageError(f"codes under a {self._q.scheme.hadamard.name} transform: reencode a tensor without one")
        if not isinstance(target, str):
            raise UsageError(f"target {_shown(target)} is not a name such as 'row'")
        scheme = find_reencoding(target, self.format).scheme
        found = reencode(self._q, scheme, self._backend)
        again = QuantizedTensor(found.quantized, as_torch=self._as_torch, backend=self._backend, axis=self._axis)
        return again, found.inexact

    def __repr__(self) -> str:
        scheme = self._q.scheme
        return f"QuantizedTensor({self.format.name}, scale_rounding={scheme.scale_rule.name}, shape={list(self.shape)})"

    def _turned_back(self, array: Any) -> Tensor:
        return self._out(array.swapaxes(-1, -2) if self._axis == COLUMN else array)

    def _out(self, array: Any) -> Tensor:
        if not self._as_torch or not isinstance(array, np.ndarray):
            return cast("Tensor", array)
        import torch

        return cast("Tensor", torch.from_numpy(array))


def quantize(
    x: Tensor,
    format: str | BlockFormat,
    *,
    axis: str = ROW,
    on_indivisible: str = "pad",
    device: str | None = None,
    threads: int | None = None,
    **rules: Unpack[RuleOptions],
) -> QuantizedTensor:
    """Quantize a float tensor; blocks run along the last dimension (2-D blocks over the last two).

    `axis`: row, or column (blocks along the dimension before the last: bit for bit the rows of the transpose);
    `quantize_both` gives the two. `on_indivisible`: pad (the last block is completed with zeros, codes keep the shape
    of x) or error.

    `rules` are named as on the command line, and what is not named is the dialect's choice: scale_rounding, rounding,
    dialect, nonfinite (error, saturate or nan-block; default saturate), seed (of rounding="stochastic", which depends
    on it and the element's index along the axis only), hadamard (16, 32, 64 or 128: a random Hadamard transform of
    groups of that size along the axis first, with Transformer Engine's signs for 16) and hadamard_seed (other signs).
    Formats are defined on binary32: float64 is rounded to it first, which warns of finite values beyond its range (they
    count as infinite; `nonfinite="error"` refuses them), and values below it become zero.

    Raises UsageError for an unknown name or type, and RefusedError for what a policy refuses.
    """
    scheme = _scheme(format, rules)
    backend = _backend_for(x, device, threads)
    axes = _axes(axis)
    if axis == BOTH:
        raise UsageError("axis 'both' makes two tensors: call mxcli.quantize_both")
    array, dtype = _checked(x, scheme, on_indivisible, backend, *axes)
    quantized = backend.quantize(array, dtype, scheme, stats=False)
    return QuantizedTensor(quantized, as_torch=not isinstance(x, np.ndarray), backend=backend, axis=axis)


def quantize_both(
    x: Tensor,
    format: str | BlockFormat,
    *,
    on_indivisible: str = "pad",
    device: str | None = None,
    threads: int | None = None,
    **rules: Unpack[RuleOptions],
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Quantize a tensor along rows and along columns, as two products of training take it; on a GPU in one read where
    blocks are rows of 16 or 32. Arguments as in quantize."""
    scheme = _scheme(format, rules)
    backend = _backend_for(x, device, threads)
    for axis in (ROW, COLUMN):
        _checked(x, scheme, on_indivisible, backend, axis)
    array, dtype = elements_of(x)
    row, column = (
        QuantizedTensor(quantized, as_torch=not isinstance(x, np.ndarray), backend=backend, axis=axis)
        for axis, quantized in zip((ROW, COLUMN), backend.quantize_both(array, dtype, scheme), strict=True)
    )
    return row, column


def quantize_dequantize(
    x: Tensor,
    format: str | BlockFormat,
    *,
    axis: str = ROW,
    on_indivisible: str = "pad",
    device: str | None = None,
    threads: int | None = None,
    out: Tensor | None = None,
    **rules: Unpack[RuleOptions],
) -> Tensor:
    """Return the values that a tensor has in a format, in its kind and type: bit for bit those of `dequantize` after
    quantize, rounded to the type, in one pass that makes no codes. `out` takes them instead, in any of the types; it
    may be x. Other arguments as in quantize.

    `import mxcli.torch_operator` makes it `torch.ops.mxcli.quantize_dequantize`, which torch.compile keeps in its graph
    and which can pass gradients straight through.
    """
    scheme = _scheme(format, rules)
    backend = _backend_for(x, device, threads)
    if _axes(axis) == _axes(BOTH):
        raise UsageError("axis 'both' makes two tensors: call mxcli.quantize_dequantize for each")
    array, dtype = _checked(x, scheme, on_indivisible, backend, axis)
    made, elements = result_for(x, out)
    backend.quantize_dequantize(array, dtype, scheme, out=_along(elements, axis))
    return cast("Tensor", made)


def measure(
    x: Tensor,
    format: str | BlockFormat,
    *,
    axis: str = ROW,
    on_indivisible: str = "pad",
    device: str | None = None,
    threads: int | None = None,
    **rules: Unpack[RuleOptions],
) -> dict[str, Any]:
    """Measure one tensor: every metric of `mxcli report` (`mxcli explain METRIC` defines them); arguments as in
    quantize.

    With axis "both" the metrics under the keys "row" and "column".
    """
    scheme = _scheme(format, rules)
    backend = _backend_for(x, device, threads)

    def along(one: str) -> dict[str, Value]:
        array, dtype = _checked(x, scheme, on_indivisible, backend, one)
        q = backend.quantize(array, dtype, scheme, codes=False)
        assert q.stats is not None
        return measured(q.stats, q.format, q.shape)

    found = {one: along(one) for one in _axes(axis)}
    return found if len(found) > 1 else dict(found[axis])


def swizzle(scales: Tensor) -> Tensor:
    """Return one-byte scales [rows, blocks] in the 128x4 order of block-scaled matrix products, flat and padded with
    zeros: uint8, or E8M0 or E4M3 scales as float8. Raises UsageError for elements of another type."""
    tensor = torch_tensor(scales)
    if tensor is None:
        array = plain_array(scales)
        _check_scales(f"an array of type {array.dtype.name}", array.dtype.name)
        return packing.swizzle(array)
    import torch

    check_plain(tensor)
    name = dtype_name(tensor)
    _check_scales(f"a tensor of type {name}", name)
    swizzled = packing.swizzle(tensor.detach().resolve_neg().view(torch.uint8).cpu().numpy())
    return cast("Tensor", torch.from_numpy(swizzled).to(tensor.device))


def _check_scales(what: str, name: str) -> None:
    if name not in _SCALE_DTYPES:
        raise UsageError(f"{what} is not one of {', '.join(_SCALE_DTYPES)}: scales are one byte each")


def _scheme(format: str | BlockFormat, rules: RuleOptions) -> Scheme:
    """Return the scheme of a format under rules. Raises UsageError for values of another type."""
    if not isinstance(format, str | BlockFormat):
        raise UsageError(f"format {_shown(format)} is neither a name such as 'mxfp8' nor a row of mxcli.formats")
    given: dict[str, Any] = dict(rules)
    for name in _NAMES:
        if given.get(name) is not None and not (isinstance(given[name], str) and given[name].strip()):
            raise UsageError(f"{name} {_shown(given[name])} is not a name")
    if not isinstance(given.get("nonfinite", ""), str):
        raise UsageError(f"nonfinite {_shown(given['nonfinite'])} is not one of {', '.join(NONFINITE_POLICIES)}")
    for name, what in (
        ("seed", "a seed is an integer from 0 to 4294967295"),
        ("hadamard", "a Hadamard transform has 16, 32, 64 or 128 elements"),
        ("hadamard_seed", "a seed is an integer from 0"),
    ):
        if given.get(name) is not None:
            given[name] = _whole(name, given[name], what)
    return resolve(format, rules_from(given))


def _whole(name: str, value: object, what: str) -> int:
    """Return a number of Python or numpy as an int. Raises UsageError for anything else, bool included."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise UsageError(f"{name} {_shown(value)}: {what}")
    return int(value)


def _shown(value: object) -> str:
    """Return a value as Python writes it, in one short line."""
    return printable(" ".join(repr(value).split()))


@functools.cache
def _backend(device: str | None, threads: int | None) -> Backend:
    """Return the backend of a device, found once: looking for GPUs costs more than quantizing a small tensor."""
    return choose_backend(device, threads=threads)


@functools.cache
def _resident(device: str) -> Backend:
    """Return the backend of tensors on a GPU."""
    return open_resident(device)


def _backend_for(x: Tensor, device: str | None, threads: int | None) -> Backend:
    """Return the backend of the tensor's GPU, or of the named device for a tensor in memory."""
    if device is not None and not isinstance(device, str):
        if "torch" not in sys.modules or not isinstance(device, sys.modules["torch"].device):
            raise UsageError(f"device {device!r} is neither a word such as 'cuda:0' nor a torch device")
        device = str(device)
    if threads is not None:
        threads = _whole("threads", threads, f"give a whole number from 1 to {_MOST_THREADS}")
        if threads > _MOST_THREADS:
            raise UsageError(f"threads {threads}: give a whole number from 1 to {_MOST_THREADS}")
    tensor = torch_tensor(x)
    if tensor is None:
        plain_array(x)
        return _backend(device, threads)
    if tensor.device.type == CPU:
        check_plain(tensor)
        return _backend(device, threads)
    where = str(tensor.device)
    if tensor.device.type != CUDA:
        raise UsageError(f"a tensor on {where}: only tensors in memory and on CUDA devices are read; pass x.cpu()")
    if device not in (None, AUTO, tensor.device.type, where):
        raise UsageError(f"device '{device}' for a tensor on {where}: pass x.to('{device}'), or leave device out")
    return _resident(where)


def _axes(axis: str) -> tuple[str, ...]:
    """Return the axes that a name stands for."""
    if not isinstance(axis, str) or axis not in (ROW, COLUMN, BOTH):
        raise UsageError(f"axis {_shown(axis)} is none of {ROW}, {COLUMN}, {BOTH}")
    return tuple(str(one) for one in axes_of(axis))


def _exchanged_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _along(x: Tensor, axis: str) -> Tensor:
    """Return the tensor with blocks along its last dimension."""
    if axis == COLUMN and x.ndim < 2:
        raise UsageError(f"a tensor of {x.ndim} dimensions has no columns")
    return x.swapaxes(-1, -2) if axis == COLUMN else x


def _checked(tensor: Tensor, scheme: Scheme, on_indivisible: str, backend: Backend, axis: str = ROW) -> tuple[Any, str]:
    """Return the elements along an axis and their type, after what the policies refuse is refused."""
    x, dtype = elements_of(_along(tensor, axis))
    if not isinstance(on_indivisible, str) or on_indivisible not in ("pad", "error"):
        raise UsageError(f"on_indivisible {_shown(on_indivisible)} is neither pad nor error")
    if x.ndim == 0:
        raise UsageError("a tensor without dimensions has no blocks: give it one, x.reshape(1)")
    if on_indivisible == "error" and not divides(scheme.format, x.shape):
        raise RefusedError(
            f"shape {list(x.shape)} does not divide into blocks of {scheme.format.block_name} ({scheme.format.name}): "
            "pad it, or pass on_indivisible='pad'"
        )
    beyond = beyond_binary32(x) if dtype == "F64" else 0
    if scheme.nonfinite == "error":
        found = backend.amax(x, dtype)
        if found.nonfinite:
            values = nonfinite_values(found.nonfinite, math.prod(x.shape), x.shape, found.first_nonfinite)
            if beyond == found.nonfinite:
                values = values.replace("NaN or infinite", _BEYOND)
            elif beyond:
                values += f"; {beyond:,} of them are {_BEYOND}"
            raise RefusedError(f"{values}: pass nonfinite='saturate' or 'nan-block'")
        if scheme.hadamard is not None and backend.amax(x, dtype, scheme.hadamard).nonfinite:
            raise RefusedError(
                f"values that overflow binary32 under the {scheme.hadamard.name} transform: scale them down"
            )
    elif beyond:
        warnings.warn(
            f"{beyond:,} of {math.prod(x.shape):,} values are {_BEYOND}, in which formats are defined: they count as "
            "infinite (nonfinite='error' refuses them)",
            stacklevel=3,
        )
    return x, dtype
