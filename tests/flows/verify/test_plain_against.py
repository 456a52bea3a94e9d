"""Plain tensors against their originals: damage where the others are copies, and what producers change on purpose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from planted import Tensors, changed, found, quantized, source, values, verified
from tiny_models import LLAMA, Tensor, bf16, floats, llama, read_raw, write_model

from mxcli.files.model_files import RECORD
from mxcli.flows.plan.plan import Options

LAYERS = 4
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
INPUT, AFTER = (f"model.layers.{{}}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plain model of four layers, and it as another producer's checkpoint."""
    folder = tmp_path_factory.mktemp("plain")
    model = source(folder / "m", llama(LAYERS))
    made = quantized(model, folder / "q", Options("mxfp4"))
    (made / RECORD).unlink()
    return model, made


def checked(tmp_path: Path, folders: tuple[Path, Path], change: Callable[[Tensors], object]) -> dict[str, list[str]]:
    return found(verified(changed(folders[1], tmp_path / "q", change), folders[0]))


def bit(name: str) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        tensors[name][1].reshape(-1)[7] ^= 1

    return change


@pytest.mark.parametrize("name", [EMBEDDING, HEAD, NORM, INPUT.format(0), INPUT.format(3), AFTER.format(2)])
def test_a_bit_is_a_problem(tmp_path: Path, folders: tuple[Path, Path], name: str) -> None:
    assert checked(tmp_path, folders, bit(name)) == {"damaged": [name]}


def row_doubled(tensors: Tensors) -> None:
    tensors[EMBEDDING][1][3] += 1 << 7


def page_copied(tensors: Tensors) -> None:
    tensors[HEAD][1][8:10] = tensors[HEAD][1][20:22]


@pytest.mark.parametrize(("change", "name"), [(row_doubled, EMBEDDING), (page_copied, HEAD)])
def test_damage_in_a_row_is_a_problem(
    tmp_path: Path, folders: tuple[Path, Path], change: Callable[[Tensors], object], name: str
) -> None:
    assert checked(tmp_path, folders, change) == {"damaged": [name]}


@pytest.mark.parametrize(
    ("one", "other"), [(INPUT.format(1), INPUT.format(2)), (INPUT.format(0), AFTER.format(3)), (NORM, AFTER.format(0))]
)
def test_norms_in_each_others_place_are_named(tmp_path: Path, one: str, other: str) -> None:
    """With values that are near each other, as those of trained norms are."""
    random = np.random.default_rng(0)
    tensors = {
        name: bf16(1 + 0.1 * random.standard_normal(64)) if "norm" in name else tensor
        for name, tensor in llama(LAYERS).items()
    }
    model = source(tmp_path / "m", tensors)
    made = quantized(model, tmp_path / "made", Options("mxfp4"))
    (made / RECORD).unlink()

    def exchange(tensors: Tensors) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    result = verified(changed(made, tmp_path / "q", exchange), model)
    assert sorted(found(result)["damaged"]) == sorted([one, other])
    assert any(value.endswith(f"these are the values of '{other}'") for value in values(result, "damaged"))


def scaled(*kinds: str, factor: float = 1.25) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        for name, (dtype, array) in list(tensors.items()):
            if any(kind in name for kind in kinds):
                tensors[name] = bf16(floats((dtype, array.shape, array.tobytes())) * np.float32(factor))

    return change


@pytest.mark.parametrize("kinds", [("input_layernorm",), ("input_layernorm", "post_attention_layernorm")])
def test_kinds_that_a_producer_rescaled_are_a_warning(
    tmp_path: Path, folders: tuple[Path, Path], kinds: tuple[str, ...]
) -> None:
    result = verified(changed(folders[1], tmp_path / "q", scaled(*kinds)), folders[0])
    assert found(result).keys() == {"changed"}
    assert values(result, "changed") == ["values differ from the source; 4 of 4 such tensors differ"] * 4 * len(kinds)
    assert result.is_sound


def test_damage_beside_rescaled_norms_is_a_problem(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    def change(tensors: Tensors) -> None:
        scaled("input_layernorm")(tensors)
        bit(EMBEDDING)(tensors)

    assert checked(tmp_path, folders, change)["damaged"] == [EMBEDDING]


def test_a_rotated_embedding_and_head_are_a_warning(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    names = checked(tmp_path, folders, scaled("embed", "lm_head", "norm", factor=1.0625))
    assert names.keys() == {"changed"}


CASTS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


def as_type(dtype: str) -> dict[str, Tensor]:
    values = {name: floats((each[0], each[1].shape, each[1].tobytes())) for name, each in llama(LAYERS).items()}
    return {name: (dtype, value.astype(CASTS[dtype])) for name, value in values.items()}


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_casts_are_copies_and_their_damage_is_found(tmp_path: Path, folders: tuple[Path, Path], dtype: str) -> None:
    model = source(tmp_path / "m", as_type("F32"), {**LLAMA, "dtype": "float32"})
    made = quantized(model, tmp_path / "made", Options("mxfp4"))
    (made / RECORD).unlink()

    def cast(tensors: Tensors) -> None:
        for name, (held, array) in list(tensors.items()):
            if held == "F32":
                tensors[name] = dtype, array.astype(CASTS[dtype])

    assert found(verified(changed(made, tmp_path / "sound", cast), model)).keys() <= {"retyped", "model_dtype"}

    def damaged(tensors: Tensors) -> None:
        cast(tensors)
        tensors[NORM][1].reshape(-1).view(np.uint8)[4 * CASTS[dtype]().nbytes] ^= 1

    assert found(verified(changed(made, tmp_path / "q", damaged), model))["damaged"] == [NORM]


def test_bfloat16_is_rounded_to_the_nearest(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    shapes = {name: array.shape for name, (_, array) in llama().items()}
    tensors = {name: ("F32", random.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
    model = source(tmp_path / "m", tensors, {**LLAMA, "dtype": "float32"})
    made = quantized(model, tmp_path / "made", Options("mxfp4"))
    (made / RECORD).unlink()

    def cast(tensors: Tensors) -> None:
        import torch

        for name, (held, array) in list(tensors.items()):
            if held == "F32":
                half = torch.from_numpy(array.copy()).to(torch.bfloat16)
                tensors[name] = "BF16", half.view(torch.int16).numpy().view(np.uint16)

    assert found(verified(changed(made, tmp_path / "q", cast), model)).keys() == {"retyped", "model_dtype"}


@pytest.mark.parametrize("name", [EMBEDDING, "model.layers.2.mlp.up_proj.weight", INPUT.format(1)])
def test_another_source_is_said_once(tmp_path: Path, folders: tuple[Path, Path], name: str) -> None:
    made = quantized(folders[0], tmp_path / "q", Options("nvfp4"))
    tensors: dict[str, Tensor] = {
        each: (dtype, np.frombuffer(data, np.uint16).reshape(shape).copy())
        for each, (dtype, shape, data) in read_raw(folders[0] / "model.safetensors").items()
    }
    tensors[name][1].reshape(-1)[5] ^= 0x40
    other = write_model(tmp_path / "other", tensors, LLAMA)
    result = verified(made, other)
    assert found(result) == {"other_source": [str(other / "model.safetensors")]}
    assert values(result, "other_source") == [
        f"SOURCE is not what this was made from: tensor '{name}' does not have the hash in mxcli.json"
    ]
    assert not result.is_sound


def test_how_many_tensors_of_another_source_differ_is_said(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    made = quantized(folders[0], tmp_path / "q", Options("nvfp4"))
    doubled = {name: bf16(2 * floats((dtype, x.shape, x.tobytes()))) for name, (dtype, x) in llama(LAYERS).items()}
    other = source(tmp_path / "other", doubled)
    result = verified(made, other)
    assert found(result).keys() == {"other_source"}
    assert values(result, "other_source")[0].endswith(", and 38 more have not")
