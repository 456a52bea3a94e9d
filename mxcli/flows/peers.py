"""Other packages' quantizers, called as their users call them, for timing beside ours; each is optional.

A peer is built only when asked for: importing torch takes seconds, compiling tens of seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mxcli.errors import UsageError, did_you_mean

Codes = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """One package's quantizer of one format and rule, on a BF16 tensor given as its bits.

    `build(bits, threads)` returns a call that quantizes and returns nothing of use, and one that returns the packed
    codes and the scales as bytes. Raises ImportError where the package is missing.
    """

    name: str
    format: str
    scale_rounding: str
    build: Callable[[Codes, int], tuple[Callable[[], object], Callable[[], tuple[Codes, Codes]]]]


def _torchao(format: str, rule: str, compiled: bool) -> Peer:
    def build(bits: Codes, threads: int) -> tuple[Callable[[], object], Callable[[], tuple[Codes, Codes]]]:
        import torch

        x = torch.from_numpy(bits).view(torch.bfloat16)
        quantizer = _nvfp4(torch) if format == "nvfp4" else _mx(torch, format, rule)
        if compiled:
            torch.set_num_threads(threads)
            quantizer = torch.compile(quantizer)

        def call() -> Any:
            torch.set_num_threads(threads)  # the setting is the process's, and rows take turns
            return quantizer(x)

        def result() -> tuple[Codes, Codes]:
            scales, codes = call()
            return codes.view(torch.uint8).numpy(), scales.view(torch.uint8).numpy()

        return call, result

    return Peer("torchao-compiled" if compiled else "torchao", format, rule, build)


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
