"""Other packages' quantizers, called as their users call them, for timing beside ours; each is optional.

A peer is built only when asked for: importing torch takes seconds, compiling tens of seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from mxcli.errors import UsageError, did_you_mean

Codes = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """One package's quantizer of one format and rule, on a BF16 tensor given as its bits.

    `quantizer(torch)` is the function as users call it: a torch tensor to scales and packed codes; it raises
    ImportError where the package is missing.
    """

    name: str
    format: str
    scale_rounding: str
    quantizer: Callable[[Any], Callable[[Any], tuple[Any, Any]]]

    def build(self, bits: Codes, threads: int) -> tuple[Callable[[], object], Callable[[], tuple[Codes, Codes]]]:
        """A call that quantizes and returns nothing of use, and one that returns packed codes and scales as bytes."""
        import torch

        x = torch.from_numpy(bits).view(torch.bfloat16)
        torch.set_num_threads(threads)
        quantizer = self.quantizer(torch)

        def call() -> Any:
            torch.set_num_threads(threads)  # the setting is the process's, and rows take turns
            return quantizer(x)

        return call, lambda: _bytes(torch, call())

    def on_gpu(
        self, tile: Codes, rows: int, device: str
    ) -> tuple[Callable[[Callable[[], None]], float], Callable[[], tuple[Codes, Codes]]]:
        """On a GPU, for a tensor of `rows` rows that repeats the tile: a call that returns the seconds that the device
        took for it after what it is given to call first, and one that returns codes and scales of the tile.
        """
        import torch

        if not torch.cuda.is_available():
            raise ImportError(f"torch {torch.__version__} has no CUDA here")
        one = torch.from_numpy(tile).view(torch.bfloat16).to(device)
        x = one.repeat(rows // len(tile), 1)
        quantizer = self.quantizer(torch)

        def call(before: Callable[[], None]) -> float:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before()
            start.record()
            quantizer(x)
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        return call, lambda: _bytes(torch, quantizer(one))


def _bytes(torch: Any, result: tuple[Any, Any]) -> tuple[Codes, Codes]:
    """Codes and scales of a quantizer's result."""
    scales, codes = result
    return codes.view(torch.uint8).cpu().numpy(), scales.view(torch.uint8).cpu().numpy()


def _torchao(format: str, rule: str, compiled: bool) -> Peer:
    def quantizer(torch: Any) -> Callable[[Any], tuple[Any, Any]]:
        made = _nvfp4(torch) if format == "nvfp4" else _mx(torch, format, rule)
        return cast("Callable[[Any], tuple[Any, Any]]", torch.compile(made)) if compiled else made

    return Peer("torchao-compiled" if compiled else "torchao", format, rule, quantizer)


def _mx(torch: Any, format: str, rule: str) -> Callable[[Any], Any]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    element = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp4_e2m1": torch.float4_e2m1fn_x2}[format]
    mode = ScaleCalculationMode[rule.upper()]
    return lambda x: to_mx(x, element, 32, mode)


def _nvfp4(torch: Any) -> Callable[[Any], Any]:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    return lambda x: nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().max()))


PEERS: tuple[Peer, ...] = tuple(
    _torchao(format, rule, compiled)
    for compiled in (False, True)
    for format, rule in (("mxfp8_e4m3", "rceil"), ("mxfp4_e2m1", "rceil"), ("nvfp4", "torchao"))
)
PEER_NAMES = tuple(dict.fromkeys(peer.name for peer in PEERS))


def named_peers(names: list[str]) -> list[Peer]:
    """The rows of the peers called so; raises UsageError for an unknown name."""
    for name in names:
        if name not in PEER_NAMES:
            raise UsageError(
                f"unknown peer '{name}': known are {', '.join(PEER_NAMES)}.{did_you_mean(name, PEER_NAMES)}"
            )
    return [peer for peer in PEERS if peer.name in names]
