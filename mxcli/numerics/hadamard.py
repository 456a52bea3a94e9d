"""Random Hadamard transforms as rows: a size and the signs that make it random.

A group x of `size` neighbours along the blocks' axis becomes y = x diag(d) H / sqrt(size), H being Sylvester's matrix
(H_1 = [1], H_2n = [[H, H], [H, -H]]) and d the signs: orthogonal, and undone by y H diag(d) / sqrt(size). Outliers of a
group are spread over all of it. Applied to both operands of a product along the dimension that it sums over, it leaves
the product as it is (Pretraining Large Language Models with NVFP4, section 4.2 and appendix C).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from mxcli.errors import UsageError, printable


@dataclass(frozen=True, slots=True)
class Transform:
    """A kind of transform applied to tensors before quantization."""

    name: str
    meaning: str
    formula: str
    source: str
    aliases: tuple[str, ...] = ()


SIZES = (16, 32, 64, 128)
TE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The fixed signs of Transformer Engine, whose transforms are of 16 elements."""
TRANSFORMS: dict[str, Transform] = {
    row.name: row
    for row in (
        Transform(
            "hadamard",
            "a random Hadamard transform of groups of 16, 32, 64 or 128 neighbours along the blocks: it spreads a "
            "large value over its group, so that fewer small values next to it underflow. Orthogonal: dequantizing "
            "undoes it, and with the same signs on both operands of a product it cancels. --hadamard-seed chooses "
            "the signs; without it groups of 16 have Transformer Engine's",
            "y = x diag(d) H / sqrt(n), H Sylvester's matrix, d the signs",
            "Pretraining Large Language Models with NVFP4, section 4.2 and appendix C; Transformer Engine",
            ("rht", *(f"hadamard-{size}" for size in SIZES)),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Hadamard:
    """A transform of groups of `size` elements with a sign (1 or -1) each; `seed` None: not drawn by one. `bf16`: its
    values are rounded to bfloat16."""

    size: int
    signs: tuple[int, ...]
    seed: int | None = None
    bf16: bool = False

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"hadamard-{self.size}"


def stated_hadamard(size: int | None, seed: int | None) -> Hadamard | None:
    """Return the requested transform, if any; raises UsageError for an unknown size, and for a seed without a size."""
    if size is not None:
        return find_hadamard(size, seed)
    if seed is not None:
        raise UsageError(f"--hadamard-seed {seed} has no effect without a transform: add --hadamard.")
    return None


def signs_text(hadamard: Hadamard) -> str:
    """Return the signs as text, + or - for each element of a group."""
    return "".join("+" if sign > 0 else "-" for sign in hadamard.signs)


def hadamard_record(hadamard: Hadamard) -> dict[str, object]:
    """Return a transform for JSON: its size, the seed of its signs (None: not drawn by one), and the signs."""
    return {"size": hadamard.size, "seed": hadamard.seed, "signs": signs_text(hadamard)}


def hadamard_of(signs: str | None) -> Hadamard | None:
    """Return the transform with signs written as + and - (None for None); raises UsageError for other text."""
    if signs is None:
        return None
    if len(signs) not in SIZES or set(signs) - {"+", "-"}:
        raise UsageError(
            f"'{printable(signs)}' is not the signs of a Hadamard transform of {', '.join(map(str, SIZES))}"
        )
    return Hadamard(len(signs), tuple(1 if sign == "+" else -1 for sign in signs))


def find_hadamard(size: int, seed: int | None = None) -> Hadamard:
    """Return the transform of that size. Signs follow from the seed; without one they are Transformer Engine's for 16
    elements, and those of seed 0 for other sizes. Raises UsageError for another size or a negative seed."""
    if not isinstance(size, int) or size not in SIZES:
        raise UsageError(f"a Hadamard transform of {size!r}: --hadamard takes {', '.join(map(str, SIZES))}.")
    if seed is None and size == len(TE_SIGNS):
        return Hadamard(size, TE_SIGNS)
    chosen = seed or 0
    if not (isinstance(chosen, int) and chosen >= 0):
        raise UsageError(f"--hadamard-seed {chosen}: a seed is an integer from 0.")
    bits = int.from_bytes(hashlib.sha256(f"hadamard {chosen}".encode()).digest(), "little")
    return Hadamard(size, tuple(-1 if bits >> place & 1 else 1 for place in range(size)), chosen)
