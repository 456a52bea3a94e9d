"""Weights that tensors next to their codes change: NVFP4_AWQ and NVFP4_SVD of ModelOpt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import SHARD, Tensors, changed, found, quantized, source, verified
from tiny_models import bf16, llama, noise, read_raw

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.layouts import LAYOUTS, OnDisk, refusal
from mxcli.files.tensors import TensorInfo
from mxcli.flows.plan.plan import Options
from mxcli.flows.verify.subject import subject_of
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.restore import on_disk

DOWN = "model.layers.0.mlp.down_proj"
MODELOPT = LAYOUTS["modelopt"]
FACTORS = np.random.default_rng(1).choice([0.5, 0.75, 1.0, 2.0], 128)
A, B = (np.random.default_rng(seed).standard_normal(shape) * 0.25 for seed, shape in ((2, (4, 128)), (3, (64, 4))))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny Llama in NVFP4 in ModelOpt's layout, without its record."""
    folder = tmp_path_factory.mktemp("modelopt")
    out = quantized(source(folder / "m"), folder / "q", Options("nvfp4", layout="modelopt"))
    (out / "mxcli.json").unlink()
    return out


def adjusted(folder: Path, output: Path, parts: dict[str, Any], algorithm: str = "NVFP4_AWQ") -> Path:
    """Returns a copy with tensors next to the codes of one layer, stated as an algorithm."""

    def add(tensors: Tensors) -> None:
        tensors.update({f"{DOWN}.{name}": tensor for name, tensor in parts.items()})

    return changed(folder, output, add, quant_algo=algorithm)


def test_vllm_refuses_weights_that_other_tensors_change(made: Path, tmp_path: Path) -> None:
    """The quant_algo NVFP4_AWQ is not among those that vLLM 0.32 knows."""
    folder = adjusted(made, tmp_path / "q", {"pre_quant_scale": bf16(FACTORS)})
    said = {verdict.engine.name: verdict.outcome for verdict in verified(folder).loaders}
    assert said["vllm"] == "refuses"
    assert {verdict.engine.name: verdict.outcome for verdict in verified(made).loaders}["vllm"] == "loads"


def values(folder: Path, output: Path, dtype: str = "F32") -> np.ndarray:
    dequantize_checkpoint(open_checkpoint(folder), output, dtype=dtype, backend=Cpu())
    stored, shape, data = read_raw(output / SHARD)[f"{DOWN}.weight"]
    assert stored == dtype
    return np.frombuffer(data, np.float32 if dtype == "F32" else np.uint16).reshape(shape)


def wide(tensor: Any) -> np.ndarray:
    dtype, array = tensor
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array.astype(np.float32)


@pytest.mark.parametrize("scale", [bf16(FACTORS), ("F32", FACTORS.astype(np.float32)), ("F16", FACTORS.astype("f2"))])
def test_a_scale_of_the_inputs_is_in_the_values(tmp_path: Path, made: Path, scale: Any) -> None:
    folder = adjusted(made, tmp_path / "q", {"pre_quant_scale": scale})
    plain = values(made, tmp_path / "a")
    np.testing.assert_array_equal(values(folder, tmp_path / "b"), plain * FACTORS.astype(np.float32))
    as_bf16 = values(folder, tmp_path / "c", "BF16")
    bits = (plain * FACTORS.astype(np.float32)).view(np.uint32)
    np.testing.assert_array_equal(as_bf16, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    assert found(verified(folder)) == {
        "possible_misreading": [f"{DOWN}.pre_quant_scale"],
        "some_loader": [f"{DOWN}.weight"],
    }
    notes = json.loads((tmp_path / "b" / "mxcli.json").read_text())["notes"]
    assert any("multiplied by pre_quant_scale" in note for note in notes)
    assert f"{DOWN}.pre_quant_scale" not in read_raw(tmp_path / "b" / SHARD)


@pytest.mark.parametrize("with_scale", [False, True])
def test_a_product_of_thin_matrices_is_added_before_the_scale(tmp_path: Path, made: Path, with_scale: bool) -> None:
    parts = {"svdquant_lora_a": bf16(A), "svdquant_lora_b": bf16(B)}
    parts |= {"pre_quant_scale": bf16(FACTORS)} if with_scale else {}
    folder = adjusted(made, tmp_path / "q", parts, "NVFP4_SVD")
    low_rank = wide(parts["svdquant_lora_b"]).astype(np.float64) @ wide(parts["svdquant_lora_a"])
    expected = (values(made, tmp_path / "a") + low_rank) * (FACTORS if with_scale else 1)
    np.testing.assert_array_equal(values(folder, tmp_path / "b"), expected.astype(np.float32))
    assert list(found(verified(folder))) == ["possible_misreading", "some_loader"]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"pre_quant_scale": noise(64)}, "pre_quant_scale is BF16 [64]; it needs floats [128]"),
        ({"pre_quant_scale": noise(1, 128)}, "pre_quant_scale is BF16 [1, 128]; it needs floats [128]"),
        ({"pre_quant_scale": ("U8", np.ones(128, np.uint8))}, "pre_quant_scale is U8 [128]; it needs floats [128]"),
        ({"svdquant_lora_a": bf16(A)}, "svdquant_lora_a has no other half"),
        ({"svdquant_lora_b": bf16(B)}, "svdquant_lora_b has no other half"),
        (
            {"svdquant_lora_a": bf16(A), "svdquant_lora_b": noise(64, 3)},
            "svdquant_lora_b is BF16 [64, 3]; it needs floats [64, 4]",
        ),
        (
            {"svdquant_lora_a": noise(4, 64), "svdquant_lora_b": bf16(B)},
            "svdquant_lora_a is BF16 [4, 64]; it needs floats [4, 128]",
        ),
    ],
)
def test_parts_that_do_not_fit_are_misfits(tmp_path: Path, made: Path, parts: dict[str, Any], why: str) -> None:
    folder = adjusted(made, tmp_path / "q", parts)
    with pytest.raises(InputError) as raised:
        dequantize_checkpoint(open_checkpoint(folder), tmp_path / "d", backend=Cpu())
    assert f"{DOWN}.{why}" in raised.value.message
    assert found(verified(folder))["misfit"] == [DOWN]


def test_a_scale_next_to_a_plain_weight_is_refused(tmp_path: Path, made: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["lm_head.pre_quant_scale"] = noise(64)

    folder = changed(made, tmp_path / "q", add)
    with pytest.raises(RefusedError, match=r"lm_head\.pre_quant_scale scales the inputs of its layer"):
        dequantize_checkpoint(open_checkpoint(folder), tmp_path / "d", backend=Cpu())


def test_no_layout_takes_such_a_weight(tmp_path: Path, made: Path) -> None:
    folder = adjusted(made, tmp_path / "q", {"pre_quant_scale": bf16(FACTORS)})
    disk = on_disk(open_checkpoint(folder))
    (weight,) = (each for each in MODELOPT.weights(disk) if each.name == f"{DOWN}.weight")
    for layout in LAYOUTS.values():
        said = refusal(layout, weight) or ""
        assert layout.refusal(weight) is not None or f"it has no place for {DOWN}.pre_quant_scale" in said


def _scaled(tensors: Tensors) -> None:
    dtype, scale = tensors[f"{DOWN}.weight_scale_2"]
    tensors[f"{DOWN}.weight_scale_2"] = (dtype, scale * np.float32(2))


@pytest.mark.parametrize(("change", "check"), [(None, "rescaled"), (_scaled, "far_from_source")])
def test_the_source_proves_the_values(tmp_path: Path, change: Callable[[Tensors], None] | None, check: str) -> None:
    """The codes are those of the weight with the inverse of the scale; the source is the weight without it."""
    tensors = llama()
    smooth = wide(tensors[f"{DOWN}.weight"]) / FACTORS.astype(np.float32)
    made = quantized(
        source(tmp_path / "s", tensors | {f"{DOWN}.weight": bf16(smooth)}),
        tmp_path / "n",
        Options("nvfp4", layout="modelopt"),
    )
    folder = adjusted(made, tmp_path / "q", {"pre_quant_scale": bf16(FACTORS)})
    if change is not None:
        folder = changed(folder, tmp_path / "c", change)
    result = found(verified(folder, source(tmp_path / "m", tensors)))
    assert {name: places for name, places in result.items() if name != "possible_misreading"} == {
        check: [f"{DOWN}.weight"],
        "some_loader": [f"{DOWN}.weight"],
    }


@pytest.mark.parametrize("size", [32, 64, 128])
def test_other_group_sizes_of_nvfp4_are_read(tmp_path: Path, size: int) -> None:
    """ModelOpt exports W4A16_NVFP4 with groups of 32, too; the codes and scales are as those of 16."""
    shapes = {
        f"{DOWN}.weight": ("U8", (64, 64)),
        f"{DOWN}.weight_scale": ("F8_E4M3", (64, 128 // size)),
        f"{DOWN}.weight_scale_2": ("F32", ()),
    }
    tensors = {name: TensorInfo(name, dtype, shape, "codes", tmp_path, 0, 0) for name, (dtype, shape) in shapes.items()}
    (weight,) = MODELOPT.weights(OnDisk(tensors, {}))
    assert (weight.name, weight.shape, weight.format.spelling) == (
        f"{DOWN}.weight",
        (64, 128),
        f"e2m1:e4m3:1x{size}:fp32",
    )
    assert {content.entry.name for content in MODELOPT.contents(weight)} == shapes.keys()
    assert MODELOPT.refusal(weight) == f"it has no e2m1:e4m3:1x{size}:fp32"


def test_the_subject_has_no_refusal(tmp_path: Path, made: Path) -> None:
    folder = adjusted(made, tmp_path / "q", {"pre_quant_scale": bf16(FACTORS)})
    subject = subject_of(open_checkpoint(folder))
    assert subject.transforms.refusal is None
    assert subject.transforms.tensors == {f"{DOWN}.pre_quant_scale"}
