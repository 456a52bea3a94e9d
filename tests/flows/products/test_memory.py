"""The memory that products need."""

from __future__ import annotations

from mxcli.flows.plan.memory import PROGRAM_BYTES, RESULT_BYTES
from mxcli.flows.products.report import TORCH_BYTES, Extent, memory_of_products


def test_the_largest_layer_decides() -> None:
    small, large = Extent("a", 64, 32, 64, 8192), Extent("b", 1024, 1024, 2048, 1 << 22)
    need = memory_of_products([small, large])
    assert need.tensor == "b"
    operands = 8 * (1024 * 2048 + 1024 * 2048 + 1024 * 1024)
    # dgrad: dY and W, and dX of 1024 x 2048, in binary64 twice; W while it is quantized; pieces of 2^20 elements.
    dgrad = 16 * (1024 * 1024 + 1024 * 2048) + 10 * 1024 * 2048 + 8 * (2 * 1024 * 2048 + 3 * (1 << 20))
    assert need.peak_bytes == PROGRAM_BYTES + 2 * RESULT_BYTES + TORCH_BYTES + (1 << 22) + operands + dgrad


def test_several_draws_add_up_in_one_more_product() -> None:
    layer = [Extent("b", 1024, 1024, 2048, 1 << 22)]
    more = [memory_of_products(layer, draws).peak_bytes - memory_of_products(layer).peak_bytes for draws in (2, 64)]
    assert more == [8 * 1024 * 2048] * 2
