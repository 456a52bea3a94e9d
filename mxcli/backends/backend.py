"""The interface that every device implements: numpy arrays in and out, the same bytes and statistics on each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mxcli.numerics.blocks import Quantized
    from mxcli.numerics.hadamard import Hadamard
    from mxcli.numerics.scheme import Scheme
    from mxcli.numerics.stats import Amax


class Backend(Protocol):
    """A device that runs the kernels: numpy arrays in and out, the same bytes and statistics on every one.

    What goes wrong with the device, memory that runs out included, is raised as EnvironmentFailure.
    """

    @property
    def name(self) -> str:
        """As `--device` takes it: `cpu`, `cuda:0`."""

    def amax(self, x: Any, dtype: str, hadamard: Hadamard | None = None) -> Amax:
        """Return the largest finite magnitude of `x`, whose elements are of safetensors type `dtype`; of its transform,
        if one is given."""

    def quantize(
        self,
        x: Any,
        dtype: str,
        scheme: Scheme,
        *,
        tensor_amax: float | None = None,
        stream: int = 0,
        codes: bool = True,
        stats: bool = True,
        per_block: bool = False,
        reuse: Quantized | None = None,
    ) -> Quantized:
        """Return `x` quantized.

        `tensor_amax` is the largest finite magnitude of the set of tensors that share a tensor scale (None: of `x`);
        where one block is the whole tensor, what its scale is made for instead: elements above it saturate. `stream` is
        the random stream of the tensor (`streams.stream_of`), used by stochastic rounding only.
        Without `codes`, `packed` and `scales` are empty. `reuse` gives up the arrays of an earlier result of the same
        shape and format, which saves the cost of fresh memory.
        """

    def quantize_both(self, x: Any, dtype: str, scheme: Scheme, *, stream: int = 0) -> tuple[Quantized, Quantized]:
        """Return `x` of two dimensions or more quantized along its rows, and along its columns, which is `x` with the
        last two dimensions exchanged; codes and scales only."""

    def dequantize(self, q: Quantized, dtype: str = "F32") -> Any:
        """Return the values of `q` as F32 or F64, or rounded to nearest even as BF16 (uint16 bits) or F16."""

    def quantize_dequantize(
        self,
        x: Any,
        dtype: str,
        scheme: Scheme,
        *,
        tensor_amax: float | None = None,
        stream: int = 0,
        out: Any = None,
    ) -> Any:
        """Return the values of `x` under a scheme, bit for bit those of `dequantize` after `quantize`: in the type of
        x, of F64 as F32, or in `out`, an array of the shape of x in any of the types (uint16 is BF16); it may be x."""
