"""Weights as operands: quantized once, and again when they change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mxcli.errors import RefusedError, printable
from mxcli.flows.emulate.decisions import Part
from mxcli.flows.emulate.operand import Devices, amax_of, quantized
from mxcli.numerics.scheme import Scheme

if TYPE_CHECKING:
    import torch

Identity = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter by the module that holds it, whose tensor may be replaced."""

    module: Any
    attribute: str

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter as it is now."""
        found: torch.Tensor = getattr(self.module, self.attribute)
        return found


def identity(tensor: torch.Tensor) -> Identity:
    """Return what changes when a tensor does: its storage, and torch's count of changes in place. Tensors of inference
    mode are not counted, so they differ every time."""
    from torch.multiprocessing.reductions import StorageWeakRef

    count: object = object() if tensor.is_inference() else tensor._version
    # As long as the reference is there, no other storage has its number, even where memory is used again.
    storage = StorageWeakRef(tensor.untyped_storage())
    return storage, tensor.data_ptr(), count, tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()


class SharedScales:
    """The amaxes that sets of weights share a tensor scale for."""

    def __init__(self, members: Iterable[tuple[Held, Part]], devices: Devices) -> None:
        self._devices = devices
        self._sets: dict[str, list[tuple[Held, Part]]] = {}
        for held, part in members:
            if part.shared is not None:
                self._sets.setdefault(part.shared, []).append((held, part))
        self._known: dict[str, tuple[Identity, float]] = {}

    def of(self, part: Part) -> float | None:
        """Return the amax of the set that a part is in; None for a part with a scale of its own."""
        if part.shared is None:
            return None
        members = self._sets[part.shared]
        now = tuple(identity(held.tensor) for held, _ in members)
        known = self._known.get(part.shared)
        if known is None or known[0] != now:
            largest = max(
                amax_of(each.of(held.tensor.detach()), self._devices, each.scheme.hadamard).value
                for held, each in members
            )
            known = self._known[part.shared] = now, largest
        return known[1]

    def forget(self) -> None:
        """Forget all amaxes."""
        self._known.clear()


@dataclass(slots=True)
class WeightOperand:
    """A parameter as its codes stand for it; what is in no part stays as it is."""

    held: Held
    parts: tuple[Part, ...]
    scales: SharedScales
    devices: Devices
    _known: dict[torch.dtype, tuple[Identity, torch.Tensor]] = field(default_factory=dict)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes of the parts."""
        return tuple(part.scheme for part in self.parts)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values in a dtype, in the parameter's shape; the same tensor until the parameter, or another one
        that shares its tensor scale, changes."""
        tensor = self.held.tensor
        amaxes = [self.scales.of(part) for part in self.parts]
        now = (*identity(tensor), *amaxes)
        known = self._known.get(dtype)
        if known is None or known[0] != now:
            self._known = {dtype: (now, self._made(tensor.detach(), dtype, amaxes))}
            known = self._known[dtype]
        return known[1]

    def forget(self) -> None:
        """Forget the values."""
        self._known = {}

    def _made(self, tensor: torch.Tensor, dtype: torch.dtype, amaxes: list[float | None]) -> torch.Tensor:
        import torch

        with torch.inference_mode(False), torch.no_grad():
            whole = len(self.parts) == 1 and self.parts[0].of(tensor).shape.numel() == tensor.numel()
            found = torch.empty_like(tensor, dtype=dtype) if whole else tensor.to(dtype, copy=True)
            for part, amax in zip(self.parts, amaxes, strict=True):
                plain = part.of(tensor)
                self._check(part, plain)
                made = quantized(plain, part.scheme, self.devices, dtype, tensor_amax=amax, stream=part.stream)
                part.of(found).copy_(made)
            return found

    def _check(self, part: Part, plain: torch.Tensor) -> None:
        if part.scheme.nonfinite != "error":
            return
        count = amax_of(plain, self.devices).nonfinite
        if count:
            raise RefusedError(
                f"{printable(part.name)}: holds {count:,} NaN or infinite values: exclude it, or state "
                "nonfinite='saturate' or 'nan-block'."
            )


def all_parts(operands: Mapping[str, tuple[Part, ...]]) -> list[Part]:
    """Return the parts of all parameters."""
    return [part for parts in operands.values() for part in parts]
