"""The harness of timed products, with a fake clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from tiny_models import bf16, noise, safetensors_bytes, write_model

from mxcli.errors import EnvironmentFailure, InputError, LimitError, UsageError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.bench import gemm_operands
from mxcli.flows.bench.gemm import GemmSettings, Peak, run_gemm_bench
from mxcli.flows.bench.gemm_kernels import GEMM_KERNELS, Product, named_kernels
from mxcli.flows.bench.gemm_operands import DISTRIBUTIONS, Values, find_distribution, open_engine
from mxcli.flows.products.shapes import Shape, layer_shapes, read_shapes, typed_shapes

torch = pytest.importorskip("torch")
SAMPLES = Path(__file__).parents[3] / "samples"
MODEL, CAPTURES = SAMPLES / "tiny-llama", SAMPLES / "tiny-llama-captures.safetensors"
NORMAL = Values(DISTRIBUTIONS["normal"])


class Stopped:
    """A clock by which every call takes a millisecond."""

    def __init__(self) -> None:
        self.calls = 0

    def seconds(self, call: Callable[[], object]) -> float:
        call()
        self.calls += 1
        return 1e-3


def test_rates_errors_and_ratios() -> None:
    kernels = named_kernels(["mxfp8-emulated", "mxfp8"])
    settings = GemmSettings(rounds=3, include_quantize=True, peak=Peak("x", {"bf16": 1e-3}, "y"))
    rows = run_gemm_bench(open_engine("cpu"), kernels, [Shape(64, 32, 128)], NORMAL, settings, Stopped())
    bf16, unmet, emulated = rows
    assert (bf16.tflops, bf16.speedup) == (2 * 64 * 32 * 128 / 1e-3 / 1e12, 1.0)
    assert bf16.peak_percent == pytest.approx(100 * 2 * 64 * 32 * 128 / 1e-3 / 1e12 / 1e-3)
    assert (unmet.tflops, unmet.timing) == (None, None)
    assert unmet.problem is not None
    assert emulated.seconds == 2e-3  # the product and making its first operand
    assert emulated.speedup == 0.5  # above 1 would be faster
    assert bf16.sqnr_db is not None
    assert emulated.sqnr_db is not None
    assert 25 < emulated.sqnr_db < 32 < 50 < bf16.sqnr_db
    assert emulated.deviation is not None
    assert emulated.deviation < 1


def test_a_wrong_product_is_not_timed() -> None:
    clock = Stopped()
    right = GEMM_KERNELS["fp8-row"]

    def prepare(*arguments: object) -> Product:
        product = right.prepare(*arguments)  # type: ignore[arg-type]
        return replace(product, call=lambda: product.call() * 2)

    wrong = replace(right, prepare=prepare)
    with pytest.raises(LimitError, match=r"fp8-row 32x32x64: the product differs from that of its operands by"):
        run_gemm_bench(open_engine("cpu"), [wrong], [Shape(32, 32, 64)], NORMAL, GemmSettings(), clock)
    assert clock.calls == 0


def test_what_the_library_refuses_is_a_reason() -> None:
    def prepare(*arguments: object) -> Product:
        def call() -> object:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling\n  cublasLtMatmul")

        product = GEMM_KERNELS["bf16"].prepare(*arguments)  # type: ignore[arg-type]
        return replace(product, call=call)  # type: ignore[arg-type]

    row = replace(GEMM_KERNELS["fp8-row"], prepare=prepare)
    (found,) = run_gemm_bench(open_engine("cpu"), [row], [Shape(32, 32, 64)], NORMAL, GemmSettings(), Stopped())
    assert found.problem == "refused by the library: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul"


def test_operands_are_the_same_for_every_run_and_never_constant_by_default() -> None:
    engine = open_engine("cpu")
    first, second = (NORMAL.operands(Shape(8, 16, 32), engine) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert not torch.equal(first[0], replace(NORMAL, seed=1).operands(Shape(8, 16, 32), engine)[0])
    assert first[0].std() > 0.9
    assert [row.name for row in DISTRIBUTIONS.values() if row.is_constant] == ["ones", "zeros"]
    with pytest.raises(UsageError, match="unknown data 'gaussian': known are normal"):
        find_distribution("gaussian")


def test_operands_of_a_model_are_its_own() -> None:
    engine = open_engine("cpu")
    model, captures = open_checkpoint(MODEL), open_checkpoint(CAPTURES)
    own = Values(DISTRIBUTIONS["normal"], 0, model, captures)
    shapes = {each.passes: each for each in layer_shapes(model, [16], ["fprop", "dgrad", "wgrad"])[:3]}
    down = shapes["fprop"]
    assert (down.layer, down.sizes, down.layers) == ("model.layers.0.mlp.down_proj.weight", (16, 128, 384), 4)
    assert (shapes["dgrad"].sizes, shapes["wgrad"].sizes) == ((16, 384, 128), (128, 384, 16))
    x, w = own.operands(down, engine)
    dy, w_turned = own.operands(shapes["dgrad"], engine)
    dy_turned, x_turned = own.operands(shapes["wgrad"], engine)
    assert torch.equal(w.t(), w_turned)
    assert torch.equal(dy.t(), dy_turned)
    assert torch.equal(x.t(), x_turned)
    assert own.own_data(down) == ("X", "W")
    assert replace(own, captures=None).own_data(down) == ("W",)


def test_operands_of_several_steps_are_those_of_one(tmp_path: Path) -> None:
    """The first step lacks a gradient: an input of one and a gradient of another do not belong together."""
    module = "model.layers.0.mlp.down_proj"
    for step, roles in enumerate((("activation",), ("activation", "gradient"), ("activation", "gradient"))):
        features = {"activation": 384, "gradient": 128}
        tensors = {f"{module}.{role}": noise(16, features[role], seed=step) for role in roles}
        (tmp_path / f"step-{step}.safetensors").write_bytes(safetensors_bytes(tensors))
    model, captures = open_checkpoint(MODEL), open_checkpoint(tmp_path)
    (shape, *_) = layer_shapes(model, [16], ["fprop"])
    own = Values(DISTRIBUTIONS["normal"], 0, model, captures)
    x, _ = own.operands(shape, open_engine("cpu"))
    assert x.view(torch.int16).numpy().tolist() == noise(16, 384, seed=1)[1].view("<i2").tolist()
    assert own.steps == (0, 1, 2)


def test_captures_are_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = Mock(wraps=gemm_operands.captured_layers)
    monkeypatch.setattr(gemm_operands, "captured_layers", gathered)
    model = open_checkpoint(MODEL)
    own = Values(DISTRIBUTIONS["normal"], 0, model, open_checkpoint(CAPTURES))
    shapes = layer_shapes(model, [16, 32], ["fprop", "dgrad", "wgrad"])
    own.check(shapes)
    assert {name for each in shapes for name in own.own_data(each)} == {"X", "W", "dY"}
    assert own.steps == (1100,)
    assert gathered.call_count == 1


def test_tokens_beyond_those_captured_repeat_them() -> None:
    model, captures = open_checkpoint(MODEL), open_checkpoint(CAPTURES)
    (shape, *_) = layer_shapes(model, [100], ["fprop"])
    x, _ = Values(DISTRIBUTIONS["normal"], 0, model, captures).operands(shape, open_engine("cpu"))
    assert torch.equal(x[64:], x[:36])


def test_shapes_as_typed_and_from_a_file(tmp_path: Path) -> None:
    assert [shape.sizes for shape in typed_shapes("1x2x3, 4x5x6")] == [(1, 2, 3), (4, 5, 6)]
    (tmp_path / "s.csv").write_text("k,m,n,note\n3,1,2,x\n")
    assert [shape.sizes for shape in read_shapes(tmp_path / "s.csv")] == [(1, 2, 3)]
    with pytest.raises(UsageError, match=r"'1x2': a shape is MxNxK") as caught:
        typed_shapes("1x2,0x1x1,3x3x3")
    assert "'0x1x1'" in str(caught.value)
    (tmp_path / "bad.csv").write_text("m,n,k\n1,2,3\n1,-2,3\n,,\n")
    with pytest.raises(InputError, match=r"bad.csv:3: 1,-2,3: needs m, n and k") as read:
        read_shapes(tmp_path / "bad.csv")
    assert "bad.csv:4" in str(read.value)
    with pytest.raises(InputError, match="holds no shapes"):
        read_shapes(_written(tmp_path / "none.csv", "m,n,k\n"))
    with pytest.raises(InputError, match="cannot be read as CSV"):
        read_shapes(tmp_path / "absent.csv")
    with pytest.raises(UsageError, match="unknown pass backward"):
        layer_shapes(open_checkpoint(MODEL), [1], ["backward"])


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_shapes_that_do_not_fit_memory_are_refused_before_any_work() -> None:
    kernels, clock = named_kernels(["fp8-row"]), Stopped()
    shapes = [Shape(16, 16, 32), Shape(1 << 20, 1 << 20, 1 << 20)]
    with pytest.raises(EnvironmentFailure, match=r"1048576x1048576x1048576 needs about [0-9,]+ bytes and cpu has"):
        run_gemm_bench(open_engine("cpu"), kernels, shapes, NORMAL, GemmSettings(), clock)
    assert clock.calls == 0


def test_memory_that_runs_out_is_reported_in_our_words() -> None:
    def prepare(*arguments: object) -> Product:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    row = replace(GEMM_KERNELS["fp8-row"], prepare=prepare)
    with pytest.raises(EnvironmentFailure, match=r"cpu: out of memory at 32x32x64: CUDA out of memory.* Give smaller"):
        run_gemm_bench(open_engine("cpu"), [row], [Shape(32, 32, 64)], NORMAL, GemmSettings(), Stopped())


def test_captures_that_do_not_fit_or_are_not_finite_are_named(tmp_path: Path) -> None:
    model = open_checkpoint(write_model(tmp_path / "m", {"a.weight": noise(32, 64)}))
    shapes = layer_shapes(model, [4], ["fprop"])

    def values(**captured: np.ndarray) -> Values:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        held = write_model(folder, {name.replace("__", "."): bf16(x) for name, x in captured.items()})
        return Values(DISTRIBUTIONS["normal"], 0, model, open_checkpoint(held))

    words = r"a.activation \[4, 63\] does not fit as X of a.weight, which has 64 features there"
    with pytest.raises(InputError, match=words):
        values(a__activation=np.ones((4, 63))).check(shapes)
    with pytest.raises(InputError, match="holds no activations or gradients of the layers"):
        values(b__activation=np.ones((4, 64))).check(shapes)
    broken = np.ones((4, 64))
    broken[1, 2] = np.nan
    with pytest.raises(InputError, match=r"a\.activation holds NaN or infinities"):
        values(a__activation=broken).operands(shapes[0], open_engine("cpu"))
    values(a__activation=np.ones((4, 64))).check(shapes)
