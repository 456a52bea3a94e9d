"""Checks that need a GPU, in one table: `python tests/gpu/check.py`, with mxcli installed on a machine with a GPU.

Bytes and statistics of all formats and rules against the CPU's, golden vectors, tensors of more than 2^31 elements,
conversion instructions on every binary32, torch tensors, failures; then speed against the device's own copy and other
packages, and matrix products. Takes a few minutes; exits 1 if anything differs. --quick omits the largest tensor and
times fewer rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("backends", "gpu", ".")]

from same_results import differences  # noqa: E402

from mxcli.backends import cpu, find_device, nvrtc, open_timed_device  # noqa: E402
from mxcli.backends.abi import kernel_scheme, literal  # noqa: E402
from mxcli.backends.cuda import Cuda  # noqa: E402
from mxcli.backends.device import Kernel, Launch, TimedDevice  # noqa: E402
from mxcli.backends.launches import Addresses, KernelJob  # noqa: E402
from mxcli.backends.nvrtc import HEADERS, Compiler, source  # noqa: E402
from mxcli.errors import EnvironmentFailure  # noqa: E402
from mxcli.flows.bench.gpu import CODES, ERRORS, STATISTICS, Case, Resident, recipes_to_time, run_gpu_bench  # noqa: E402
from mxcli.flows.bench.quantize import PEERS  # noqa: E402
from mxcli.numerics.formats import FORMATS  # noqa: E402
from mxcli.numerics.scheme import Scheme, resolve  # noqa: E402

DEVICE = "cuda:0"
SCHEMES = recipes_to_time([], None, None)
SPELLED = ("e3m2:e8m0:1x16", "e4m3:e8m0:1x24", "e2m1:e4m3:16x16:fp32", "e4m3:e8m0:128x128", "e2m3:e8m0:channel")
FOR_EVERY_RULE = ("normal BF16", "nonfinite BF16", "subnormal F32", "even BF16", "log-uniform BF16")
BENCH_SIZE = 16384
ADDRESS = 1 << 40
Line = tuple[str, str, bool]


def samples() -> dict[str, tuple[np.ndarray, str]]:
    """Return tensors of all kinds of difficult values, ragged and not."""
    from kernel_samples import SAMPLES, log_uniform, normal

    tensors: dict[str, tuple[np.ndarray, str]] = {}
    for name, x in {
        **SAMPLES,
        "even": normal(256, 4096),
        "wide": normal(3, 70001),
        "log-uniform": log_uniform(-38, 38, 130, 1000),
    }.items():
        tensors[f"{name} BF16"] = (x.view(np.uint32) >> 16).astype(np.uint16), "BF16"
        tensors[f"{name} F32"] = x, "F32"
    with np.errstate(over="ignore"):
        tensors["normal F16"] = normal(64, 333).astype(np.float16), "F16"
    return tensors


def compile_for(task: tuple[tuple[int, int], Kernel]) -> None:
    """Fill the cache of compiled kernels."""
    capability, kernel = task
    Compiler(capability).cubin(kernel)


def conversions_source(name: str, capability: tuple[int, int]) -> tuple[str, dict[str, str], str, dict[str, str]]:
    """Return text, headers, architecture and definitions of conversions.cu for a format."""
    compiler = Compiler(capability)
    definitions = {
        "MX_SCHEME": "MxScheme" + literal(kernel_scheme(resolve(name))),
        "MX_HARDWARE": str(compiler.conversions),
    }
    text = (TESTS / "gpu" / "conversions.cu").read_text(encoding="utf-8")
    return text, {header: source(header) for header in HEADERS}, compiler.architecture, definitions


class Check:
    """The checks of a device."""

    def __init__(self, device: TimedDevice, *, quick: bool) -> None:
        self.device, self.gpu, self.quick = device, Cuda(device), quick
        self.capability = self.device.capability
        self.samples = samples()

    # -------------------------------------------------------------------------------------------------- compiling

    def cases(self) -> Iterator[tuple[Scheme, str]]:
        """Yield each scheme with its tensors: all of them for a format's default rule, some for the other rules."""
        seen: set[str] = set()
        for scheme in [*(resolve(name) for name in FORMATS), *SCHEMES, *(resolve(name) for name in SPELLED)]:
            own = scheme.format.name not in seen
            seen.add(scheme.format.name)
            yield from ((scheme, name) for name in self.samples if own or name in FOR_EVERY_RULE)

    def launches(self, scheme: Scheme, shape: tuple[int, ...], dtype: str) -> Iterator[Launch]:
        """Yield a scheme's launches without and with statistics, and of values in one pass."""
        job = KernelJob(shape, dtype, scheme)
        piece, at = job.piece(0, job.cut.units), Addresses(*[ADDRESS] * 9)
        conversions = self.device.conversions
        yield job.quantize(piece, at, conversions)
        yield job.measure(piece, at, 1, conversions=conversions, codes=True)
        yield job.quantize_dequantize(piece, at, dtype)

    def compile(self) -> Line:
        """Compile all kernels on all CPU cores, and time one alone."""
        os.environ["MXCLI_CACHE_DIR"] = tempfile.mkdtemp(prefix="mxcli-check-")
        kernels: dict[Kernel, None] = {}
        for scheme, name in self.cases():
            x, dtype = self.samples[name]
            kernels |= dict.fromkeys(launch.kernel for launch in self.launches(scheme, x.shape, dtype))
        for scheme in SCHEMES:
            bench = KernelJob((BENCH_SIZE, BENCH_SIZE), "BF16", scheme)
            at = Addresses(*[ADDRESS] * 9)
            kernels[bench.quantize(bench.piece(0, bench.cut.units), at, self.device.conversions).kernel] = None
        first, *rest = kernels
        start = time.perf_counter()
        compile_for((self.capability, first))
        alone = time.perf_counter() - start
        start = time.perf_counter()
        compile_for((self.capability, first))
        cached = time.perf_counter() - start
        start = time.perf_counter()
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_for, ((self.capability, kernel) for kernel in rest), chunksize=4))
        everything = time.perf_counter() - start
        measuring = next(k for k in kernels if k.file == "measure_rows.cu")
        start = time.perf_counter()
        text, headers, definitions = Compiler(self.capability).text(measuring)
        nvrtc.compile(measuring.file, text, headers, Compiler(self.capability).architecture, definitions)
        slow = time.perf_counter() - start
        what = (
            f"{len(kernels)} kernels in {everything:.0f} s; one alone {alone:.2f} s, from the cache "
            f"{cached * 1e3:.0f} ms, with statistics {slow:.2f} s"
        )
        return "compiling (goal 1.5 s, 50 ms)", what, max(alone, slow) < 1.5 and cached < 0.05

    # ------------------------------------------------------------------------------------------------------ bytes

    def every_rule(self) -> Line:
        """Compare with the CPU: codes, scales, statistics to the last bit, per-block values."""
        compared, wrong = 0, []
        for scheme, name in self.cases():
            x, dtype = self.samples[name]
            with np.errstate(all="ignore"):
                wanted = cpu.quantize(x, dtype, scheme, per_block=True)
                plain = self.gpu.quantize(x, dtype, scheme, stats=False)
                found = differences(self.gpu.quantize(x, dtype, scheme, per_block=True), wanted)
                passed = self.gpu.quantize_dequantize(x, dtype, scheme)
                restored = self.gpu.dequantize(plain).tobytes() == cpu.dequantize(wanted).tobytes()
            if plain.packed.tobytes() != wanted.packed.tobytes() or plain.scales.tobytes() != wanted.scales.tobytes():
                found.append("codes without statistics")
            if passed.tobytes() != cpu.quantize_dequantize(x, dtype, scheme).tobytes():
                found.append("values in one pass")
            if not restored:
                found.append("dequantized")
            compared += 1
            wrong += [f"{scheme.format.name} {scheme.scale_rule.name} {name}: {each}" for each in found]
        return "CPU = GPU", outcome(f"{compared:,} times, {len(SCHEMES)} schemes", wrong), not wrong

    def golden(self) -> Line:
        """Run the tests of golden vectors and producers on this GPU."""
        files = [TESTS / "backends" / name for name in ("test_golden.py", "test_producers.py")]
        command = [sys.executable, "-m", "pytest", "-q", "-k", "gpu", "-m", "", *map(str, files)]  # slow ones too
        if importlib.util.find_spec("xdist"):
            command += ["-n", "8"]  # most of the time is compilation
        environment = {**os.environ, "MXCLI_TEST_GPU": DEVICE}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TESTS.parent, check=False)
        return "golden vectors", done.stdout.strip().splitlines()[-1], done.returncode == 0

    def conversions(self) -> Line:
        """Compare conversion instructions with numerics.h on every binary32."""
        import cupy

        wanted = {1: ("mxfp8_e4m3", "mxfp8_e5m2"), 2: ("mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1")}
        names = [name for level, group in wanted.items() if self.device.conversions >= level for name in group]
        queue, wrong = self.device.queues(1)[0], []
        for name in names:
            found = queue.empty(8)
            queue.fill(found, 0, 0, 8)
            cubin = nvrtc.cubin("conversions.cu", *conversions_source(name, self.capability))
            module = cupy.cuda.function.Module()
            module.load(cubin)
            kernel = module.get_function("mx_conversions")
            kernel((8 * self.device.processors,), (256,), (np.uint64(found.address),), stream=queue.stream)
            count = np.zeros(1, np.uint64)
            queue.download(found, count)
            queue.finish()
            if count[0]:
                wrong.append(f"{name}: {count[0]} codes differ")
        return "conversions by instruction", outcome(f"2^32 values to {len(names)} formats", wrong), not wrong

    def large(self) -> Line:
        """Check a tensor of more than 2^31 elements: the last rows' bytes, and all counts."""
        rows, columns, wrong = (1 << 16) + 512, 1 << 15, []
        if self.quick:
            return "large tensor", "omitted", True
        resident = Resident(self.device, rows, columns)
        names = ("mxfp8_e4m3", "mxfp4_e2m1", "nvfp4", "fp8_e4m3_128x128", "fp8_e4m3_channel", "fp8_e4m3")
        for name in names:
            case = Case(resident, resolve(name))
            try:
                case.check()
            except Exception as error:
                wrong.append(str(error))
        return "large tensor", outcome(f"{rows * columns:,} elements, {len(names)} formats", wrong), not wrong

    # ------------------------------------------------------------------------------------------------------- uses

    def torch_tensors(self) -> Line:
        """Check torch tensors on the GPU through `import mxcli`, on a separate stream."""
        try:
            import torch
        except ImportError as error:
            return "torch tensors", str(error), False
        import mxcli

        wrong = []
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.randn(300, 640, device=DEVICE, dtype=torch.bfloat16)
            for name in ("mxfp8", "mxfp6", "mxfp4", "nvfp4", "fp8_e4m3", "fp8_e4m3_128x128"):
                there, here = mxcli.quantize(x, name), mxcli.quantize(x.cpu(), name, device="cpu")
                for part in ("packed", "scales", "codes"):
                    if not torch.equal(getattr(there, part).cpu(), getattr(here, part)):
                        wrong.append(f"{name}: {part}")
                if not torch.equal(there.dequantize().cpu(), here.dequantize()) or there.scales.device != x.device:
                    wrong.append(f"{name}: dequantized, or on another device")
                if mxcli.measure(x, name) != mxcli.measure(x.cpu(), name, device="cpu"):
                    wrong.append(f"{name}: metrics")
        return "torch tensors", outcome("6 formats on another stream", wrong), not wrong

    def training(self) -> Line:
        """Check the features that only training needs."""
        from check_training import compare

        from mxcli.backends import open_resident

        compared, wrong = compare(self.gpu, open_resident(DEVICE), lambda x: x.to(DEVICE))
        return "training", outcome(f"{compared} schemes, and both axes", wrong), not wrong

    def training_speed(self) -> Iterator[Line]:
        """Time stochastic rounding, transforms and both axes in one read: a table without goals."""
        from check_training import timed

        from mxcli.backends import open_resident

        for what, result in timed(open_resident(DEVICE), DEVICE, 4096 if self.quick else BENCH_SIZE):
            yield what, result, True

    def checkpoints(self) -> Line:
        """Check that `mxcli quantize` writes the same files on both devices."""
        wrong = []
        with tempfile.TemporaryDirectory() as folder:
            for name in ("nvfp4", "mxfp8", "fp8_e4m3_128x128"):
                outputs = []
                for number, device in enumerate(("cpu", DEVICE)):
                    place = Path(folder) / name / str(number)
                    place.mkdir(parents=True)
                    command = [sys.executable, "-m", "mxcli", "quantize", str(TESTS.parent / "samples" / "tiny-llama")]
                    command += ["--format", name, "-o", "made", "--device", device, "-q"]
                    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place)
                    if done.returncode:
                        wrong.append(f"{name} on {device}: {done.stderr.strip()}")
                    outputs.append({file.name: file.read_bytes() for file in (place / "made").glob("*")})
                if outputs[0] != outputs[1]:
                    names = [file for file, content in outputs[0].items() if outputs[1].get(file) != content]
                    wrong.append(f"{name}: other {', '.join(names)}")
        return "mxcli quantize", outcome("3 formats, every file", wrong), not wrong

    def failures(self) -> Line:
        """Check the error of a request beyond the GPU's memory."""
        from mxcli.backends.cupy_device import CupyDevice

        requested = CupyDevice(0).free_bytes() * 4
        try:
            self.device.queues(1)[0].empty(requested)
        except EnvironmentFailure as failure:
            return "out of memory", failure.message, f"{requested:,}" in failure.message
        return "out of memory", "not reported", False

    # ------------------------------------------------------------------------------------------------------ speed

    def products(self) -> Iterator[Line]:
        """Check and time matrix products."""
        from check_gemm import LARGE, products

        from mxcli.flows.bench.gemm_operands import open_engine

        yield from products(
            open_engine(DEVICE), self.device.describe(), LARGE[:1] if self.quick else LARGE, 5 if self.quick else 15
        )

    def speed(self) -> Iterator[Line]:
        """Time all schemes, the device's copy and read, and other packages."""
        size, rounds = BENCH_SIZE, 3 if self.quick else 15
        report = run_gpu_bench(self.device, SCHEMES, size=size, rounds=rounds, peers=PEERS, work=(CODES,), check=False)
        for row in report.rows:
            yield self._timed(row)
        defaults = [resolve(name) for name in dict.fromkeys(scheme.format.name for scheme in SCHEMES)]
        measured = run_gpu_bench(
            self.device, defaults, size=size, rounds=rounds, work=(ERRORS, STATISTICS), check=False
        )
        for row in measured.rows[2:]:
            yield self._timed(row)
        yield "clocks", f"{report.clocks[0]} | {measured.clocks[1]}", True

    @staticmethod
    def _timed(row: object) -> Line:
        from mxcli.flows.bench.gpu import GpuRow

        assert isinstance(row, GpuRow)
        name = " ".join(word for word in (row.name, row.format, row.scale_rounding, row.work) if word)
        if row.timing is None:
            return name, row.problem or "", True
        spread = 100 * (row.timing.p90 - row.timing.p10) / row.timing.median
        rate = f"{row.bytes_per_second / 1e9:8.0f} GB/s" if row.bytes_per_second else ""
        elements = f"{row.elements_per_second / 1e9:8.1f} G elements/s" if row.elements_per_second else ""
        percent = f"{row.limit_percent:6.1f} % of the limit" if row.limit_percent else ""
        equal = "" if row.bytes_equal is None else ", bytes equal" if row.bytes_equal else ", other bytes"
        return name, f"{elements} {rate} {percent}, spread {spread:.1f} %{equal}".strip(), True


def outcome(what: str, wrong: list[str]) -> str:
    return f"{what}: equal" if not wrong else f"{what}: {len(wrong)} differ, first: {wrong[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    start, failed = time.perf_counter(), 0
    quick = parser.parse_args().quick
    try:
        find_device(DEVICE)
        check = Check(open_timed_device(DEVICE), quick=quick)
    except EnvironmentFailure as failure:
        print(f"error: {failure}", file=sys.stderr)
        return failure.exit_code
    print(f"{DEVICE}: {check.device.describe()}; mxcli kernel on {cpu.instruction_set()}", flush=True)

    def show(line: Line) -> int:
        what, result, good = line
        print(f"{'ok  ' if good else 'FAIL'} {time.perf_counter() - start:6.1f} s  {what:44} {result}", flush=True)
        return not good

    steps: list[Callable[[], Line]] = [
        *(check.compile, check.every_rule, check.conversions, check.golden, check.large),
        *(check.torch_tensors, check.training, check.checkpoints, check.failures),
    ]
    for step in steps:
        try:
            failed += show(step())
        except Exception as error:  # one check that breaks must not hide the others
            failed += show((step.__name__, f"{type(error).__name__}: {error}", False))
    for part in (check.speed, check.training_speed, check.products):
        for line in part():
            failed += show(line)
    print(f"{failed} of the checks failed" if failed else "all checks passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
