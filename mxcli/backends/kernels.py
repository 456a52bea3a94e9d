"""GPU kernels from their sources: which architecture a GPU is compiled for, and what a recipe is in the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from mxcli.backends import nvrtc
from mxcli.backends.device import Kernel
from mxcli.backends.library import KernelRecipe, kernel_folder
from mxcli.backends.recipes import literal

FILES = (
    *("quantize_rows.cu", "quantize_blocks.cu", "quantize_both.cu", "measure_rows.cu", "measure_blocks.cu"),
    *("dequantize.cu", "reduce.cu"),
)
HEADERS = ("numerics.h", "device.h", "blocks.h", "measure.h")


@cache
def source(file: str) -> str:
    """The text of a kernel file or header of this installation."""
    return (kernel_folder() / file).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Compiler:
    """Kernels for GPUs of one compute capability."""

    capability: tuple[int, int]

    @property
    def architecture(self) -> str:
        """What the kernels are compiled for. From 10.0 on, all that this very GPU can do."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if major >= 10 else "")

    @property
    def conversions(self) -> int:
        """MX_HARDWARE of `kernels/device.h`."""
        if self.capability < (8, 9):
            return 0
        return 1 if self.capability < (10, 0) else 2

    def text(self, kernel: Kernel) -> tuple[str, Mapping[str, str], dict[str, str]]:
        """The kernel's source, the headers it may include, and its definitions."""
        definitions = dict(kernel.definitions)
        if kernel.recipe:
            definitions["MX_RECIPE"] = "MxRecipe" + literal(KernelRecipe.from_buffer_copy(kernel.recipe))
        return source(kernel.file), {name: source(name) for name in HEADERS}, definitions

    def cubin(self, kernel: Kernel) -> bytes:
        """The file of a kernel as machine code, from the cache where it has been compiled before.

        Raises EnvironmentFailure where there is no compiler for this GPU.
        """
        text, headers, definitions = self.text(kernel)
        return nvrtc.cubin(kernel.file, text, headers, self.architecture, definitions)
