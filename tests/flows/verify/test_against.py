"""A quantized checkpoint against its source: damage of every kind, with a record and without, and what producers do on
purpose."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from planted import GATE, UP, Tensors, changed, found, quantized, source, values, verified
from tiny_models import Tensor, bf16, llama

from mxcli.files.model_files import RECORD
from mxcli.flows.plan.plan import Options
from mxcli.numerics.scheme import Rules
from mxcli.output.verification import conclusion

DOWN = "model.layers.0.mlp.down_proj.weight"
Change = Callable[[Tensors], object]
OPTIONS = {
    "nvfp4": Options("nvfp4"),
    "nvfp4 modelopt": Options("nvfp4", layout="modelopt"),
    "mxfp4": Options("mxfp4"),
    "mxfp8": Options("mxfp8"),
    "fp8 channels": Options("fp8_e4m3_channel"),
    "fp8 blocks": Options("fp8_e4m3_128x128", layout="fp8"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain model, and it in several formats."""
    folder = tmp_path_factory.mktemp("against")
    model = source(folder / "m")
    made = {name: quantized(model, folder / name.replace(" ", "-"), options) for name, options in OPTIONS.items()}
    return {"m": model} | made


def array(tensors: Tensors, *names: str) -> np.ndarray:
    return next(tensors[name][1] for name in names if name in tensors)


def codes(tensors: Tensors, weight: str = UP) -> np.ndarray:
    return array(tensors, f"{weight}_packed", weight)


def scales(tensors: Tensors) -> np.ndarray:
    return array(tensors, f"{UP}_scale", f"{UP}_scale_inv")


def zeroed(tensors: Tensors) -> None:
    codes(tensors).reshape(-1)[100:800] = 0


def flipped(tensors: Tensors) -> None:
    codes(tensors).reshape(-1)[77] ^= 2


def exchanged_nibbles(tensors: Tensors) -> None:
    part = codes(tensors).reshape(-1)[100:164]
    part[:] = (part << 4) | (part >> 4)


def permuted_rows(tensors: Tensors) -> None:
    array = codes(tensors)
    array[:] = array[np.random.default_rng(1).permutation(len(array))]


def two_rows(tensors: Tensors) -> None:
    codes(tensors)[[3, 4]] = codes(tensors)[[4, 3]]


def weights_swapped(tensors: Tensors) -> None:
    one, other = codes(tensors), codes(tensors, GATE)
    one[:], other[:] = other.copy(), one.copy()


def a_block_of_another(tensors: Tensors) -> None:
    codes(tensors)[9, :8] = codes(tensors, GATE)[9, :8]


def shuffled_scales(tensors: Tensors) -> None:
    flat = scales(tensors).reshape(-1)
    flat[:] = flat[np.random.default_rng(2).permutation(flat.size)]


def transposed_scales(tensors: Tensors) -> None:
    scales(tensors)[...] = scales(tensors).T.reshape(scales(tensors).shape)


def by_steps(steps: int, part: slice) -> Change:
    """Scales of 8 bits by steps, others by 10 % a step."""

    def change(tensors: Tensors) -> None:
        flat = scales(tensors).reshape(-1)
        if flat.dtype == np.float32:
            flat[part] *= 1.1**steps
        else:
            flat[part] = flat[part].astype(np.int64) + steps * (13 if flat.dtype == np.uint16 else 1)

    return change


EVERY, ONE = slice(None), slice(0, 1)
DAMAGE: dict[str, Change] = {
    "codes zeroed": zeroed,
    "a bit of a code": flipped,
    "rows permuted": permuted_rows,
    "two rows exchanged": two_rows,
    "codes of two weights exchanged": weights_swapped,
    "a block of another weight": a_block_of_another,
    "scales one step lower": by_steps(-1, EVERY),
    "scales one step higher": by_steps(1, EVERY),
    "a scale one step lower": by_steps(-1, ONE),
    "a scale one step higher": by_steps(1, ONE),
}
OF_GRIDS = {"scales shuffled": shuffled_scales, "scales transposed": transposed_scales}
OF_PAIRS = {"nibbles exchanged": exchanged_nibbles}
CASES = [
    (name, damage)
    for name in OPTIONS
    for damage in (
        *DAMAGE,
        *(OF_GRIDS if name in ("nvfp4", "mxfp4", "mxfp8") else ()),
        *(OF_PAIRS if "fp4" in name else ()),
    )
]


@pytest.mark.parametrize("record", [True, False], ids=["record", "no record"])
@pytest.mark.parametrize(("name", "damage"), CASES)
def test_damage_is_found(tmp_path: Path, folders: dict[str, Path], name: str, damage: str, record: bool) -> None:
    folder = changed(folders[name], tmp_path / "q", {**DAMAGE, **OF_GRIDS, **OF_PAIRS}[damage])
    if record:
        shutil.copy(folders[name] / RECORD, folder)
    result = verified(folder, folders["m"])
    assert not result.is_sound
    places = found(result).get("other_bytes", []) + found(result).get("far_from_source", [])
    assert places
    assert {place.removesuffix("_packed").removesuffix("_scale").removesuffix("_scale_inv") for place in places} <= {
        UP,
        GATE,
    }


@pytest.mark.parametrize("record", [True, False], ids=["record", "no record"])
@pytest.mark.parametrize("factor", [2.0, 0.5, 1.1, None])
def test_a_tensor_scale_that_is_off_is_found(
    tmp_path: Path, folders: dict[str, Path], factor: float | None, record: bool
) -> None:
    def scaled(tensors: Tensors) -> None:
        scale = tensors[f"{DOWN}_global_scale"][1]
        scale[...] = np.nextafter(scale, np.float32(np.inf)) if factor is None else scale * np.float32(factor)

    folder = changed(folders["nvfp4"], tmp_path / "q", scaled)
    if record:
        shutil.copy(folders["nvfp4"] / RECORD, folder)
    assert found(verified(folder, folders["m"]))["other_bytes"] == [f"{DOWN}_global_scale"]


def test_the_finding_names_the_place_and_the_bytes(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = changed(folders["nvfp4"], tmp_path / "q", flipped)
    result = verified(folder, folders["m"])
    was, now = (int(codes_of(each)[77]) for each in (folders["nvfp4"], folder))
    assert was ^ now == 2
    (value,) = values(result, "other_bytes")
    assert value.startswith(
        "codes 1 of 4,096 bytes; 1 of 512 blocks, the first row 2, columns 16 to 31; bytes 77 to 84 are "
        f"{codes_of(folder)[77:85].tobytes().hex()}; relative error 0.095"
    )
    (finding,) = next(each.findings for each in result.results if each.name == "other_bytes")
    assert finding.need == (
        f"{codes_of(folders['nvfp4'])[77:85].tobytes().hex()} there: the bytes of te, nearest-even, as mxcli, which "
        "most weights have"
    )
    shutil.copy(folders["nvfp4"] / RECORD, folder)
    result = verified(folder, folders["m"])
    (finding,) = next(each.findings for each in result.results if each.name == "other_bytes")
    assert finding.need.endswith("as mxcli, which is named for it")
    assert "Bytes: 1 of 7 weights is not what the named rules make of the source." in conclusion(result)


def codes_of(folder: Path) -> np.ndarray:
    from tiny_models import read_raw

    return np.frombuffer(read_raw(folder / "model.safetensors")[f"{UP}_packed"][2], np.uint8)


def changed_weights(change: Callable[[np.ndarray], np.ndarray]) -> dict[str, Tensor]:
    """The model with its quantized weights changed before quantization, as producers do."""

    def of(name: str, tensor: Tensor) -> Tensor:
        if not name.endswith("proj.weight"):
            return tensor
        x = (tensor[1].astype(np.uint32) << 16).view(np.float32)
        return bf16(change(x).astype(np.float32))

    return {name: of(name, tensor) for name, tensor in llama().items()}


def made_by_another(tmp_path: Path, change: Callable[[np.ndarray], np.ndarray], options: Options) -> Path:
    model = source(tmp_path / "changed", changed_weights(change))
    folder = quantized(model, tmp_path / "q", options)
    (folder / RECORD).unlink()
    return folder


@pytest.mark.parametrize(("format", "error"), [("nvfp4", 0.095), ("mxfp4", 0.12), ("mxfp8", 0.026)])
def test_codes_chosen_for_a_smaller_error_elsewhere_are_a_note(
    tmp_path: Path, folders: dict[str, Path], format: str, error: float
) -> None:
    random = np.random.default_rng(5)

    def compensated(x: np.ndarray) -> np.ndarray:
        return x + random.normal(size=x.shape) * error * np.sqrt((x**2).mean())

    folder = made_by_another(tmp_path, compensated, Options(format))
    result = verified(folder, folders["m"])
    assert result.is_sound
    assert len(found(result)["other_choice"]) == 7
    assert 1.5 < float(values(result, "other_choice")[0].split()[0]) < 2.5
    for at, damage in enumerate((zeroed, permuted_rows, two_rows, weights_swapped, by_steps(-1, EVERY))):
        damaged = verified(changed(folder, tmp_path / f"{at}", damage), folders["m"])
        assert UP in found(damaged).get("far_from_source", ()), (damage, found(damaged))


def flipped_scale(bit: int) -> Change:
    """A bit of one scale of a block."""

    def change(tensors: Tensors) -> None:
        scales(tensors).reshape(-1).view(np.uint8)[37] ^= 1 << bit

    return change


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("bit", range(7))
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 modelopt", "mxfp4", "mxfp8"])
def test_a_bit_of_one_scale_is_found(
    tmp_path: Path, folders: dict[str, Path], name: str, bit: int, record: bool
) -> None:
    folder = changed(folders[name], tmp_path / "q", flipped_scale(bit))
    if record:
        shutil.copy(folders[name] / RECORD, folder)
    result = verified(folder, folders["m"])
    places = {place.removesuffix("_packed").removesuffix("_scale") for place in found(result).get("other_bytes", [])}
    assert places == {UP} or "finite_elsewhere" in found(result)


@pytest.mark.parametrize("bit", [5, 6])
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_a_block_far_too_small_is_found_where_codes_were_searched(
    tmp_path: Path, folders: dict[str, Path], format: str, bit: int
) -> None:
    random = np.random.default_rng(5)

    def compensated(x: np.ndarray) -> np.ndarray:
        return x + random.normal(size=x.shape) * 0.1 * np.sqrt((x**2).mean())

    def sunk(tensors: Tensors) -> None:
        scales(tensors).reshape(-1)[11] -= 1 << bit

    folder = made_by_another(tmp_path, compensated, Options(format))
    assert verified(folder, folders["m"]).is_sound
    result = verified(changed(folder, tmp_path / "damaged", sunk), folders["m"])
    assert found(result)["far_from_source"] == [UP]
    assert (
        "in 1 of 256 blocks the values are far below those of the source, the first at row 5, columns 32 to 63"
        in (values(result, "far_from_source")[0])
    )


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "fp8_e4m3_channel"])
@pytest.mark.parametrize("rows", [False, True])
def test_rescaled_channels_are_said_to_be_not_comparable(
    tmp_path: Path, folders: dict[str, Path], format: str, rows: bool
) -> None:
    random = np.random.default_rng(6)

    def smoothed(x: np.ndarray) -> np.ndarray:
        factors = np.exp(random.normal(size=(1, x.shape[1])) * 0.5)
        return x * factors * (np.exp(random.normal(size=(x.shape[0], 1)) * 0.5) if rows else 1.0)

    result = verified(made_by_another(tmp_path, smoothed, Options(format)), folders["m"])
    assert result.is_sound
    assert len(found(result)["rescaled"]) == 7


def test_scales_chosen_for_the_least_error_are_no_problem(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = quantized(folders["m"], tmp_path / "q", Options("mxfp4", Rules(scale_rounding="best", nonfinite="error")))
    (folder / RECORD).unlink()
    assert verified(folder, folders["m"]).is_sound


@pytest.mark.parametrize("record", [True, False])
def test_a_plain_tensor_must_be_a_copy_where_the_others_are(
    tmp_path: Path, folders: dict[str, Path], record: bool
) -> None:
    name = "model.norm.weight"

    def nudged(tensors: Tensors) -> None:
        tensors[name][1][3] ^= 1

    folder = changed(folders["nvfp4"], tmp_path / "q", nudged)
    if record:
        shutil.copy(folders["nvfp4"] / RECORD, folder)
    (value,) = values(verified(folder, folders["m"]), "damaged")
    assert value.startswith("1 of 128 bytes differ from the source, the first at [3]; there ")


@pytest.mark.parametrize("change", ["nan", "zeros", "others"])
def test_plain_tensors_far_off_are_a_problem_without_a_record(
    tmp_path: Path, folders: dict[str, Path], change: str
) -> None:
    name = "model.embed_tokens.weight"

    def plant(tensors: Tensors) -> None:
        array = tensors[name][1]
        if change == "nan":
            array[1, 1] = 0x7FC0
        elif change == "zeros":
            array[:] = 0
        else:
            array[:] = array[::-1].copy()

    assert name in found(verified(changed(folders["nvfp4"], tmp_path / "q", plant), folders["m"]))["damaged"]


def matrices(columns: int, largest: float = 1.0) -> dict[str, Tensor]:
    """Three weights with values up to `largest`, the last one of the usual size."""
    draws = np.random.default_rng(7)
    sizes = {"a.weight": largest, "b.weight": largest, "c.weight": 1.0}
    return {name: bf16(draws.uniform(-1, 1, (64, columns)).astype(np.float32) * size) for name, size in sizes.items()}


def made(folder: Path, fmt: str, columns: int, largest: float = 1.0) -> tuple[Path, Path]:
    """A model of matrices, and it quantized in the layout that pads."""
    model = source(folder / "m", matrices(columns, largest), {})
    return model, quantized(model, folder / "q", Options(fmt, layout="mxcli", on_indivisible="pad"))


@pytest.mark.parametrize("record", [True, False], ids=["record", "no record"])
@pytest.mark.parametrize(
    ("fmt", "columns", "place"),
    [
        ("mxfp6_e2m3", 50, "columns 32 to 49"),
        ("mxfp6_e3m2", 33, "columns 32 to 32"),
        ("mxfp4", 33, "columns 32 to 32"),
        ("nvfp4", 33, "columns 32 to 32"),
    ],
)
def test_codes_that_fill_up_a_row_are_compared(
    tmp_path: Path, fmt: str, columns: int, place: str, record: bool
) -> None:
    def change(tensors: Tensors) -> None:
        tensors["a.weight_packed"][1][5, -1] ^= 0x80

    model, output = made(tmp_path, fmt, columns)
    assert found(verified(output, model)) == {}
    folder = changed(output, tmp_path / "d", change)
    if record:
        shutil.copy(output / RECORD, folder)
    result = verified(folder, model)
    assert found(result)["other_bytes"] == ["a.weight_packed"]
    (value,) = values(result, "other_bytes")
    assert f"the first row 5, {place}; codes that fill up the bytes of a row are not 0; bytes " in value


def test_codes_that_fill_up_a_row_of_zeros_are_compared(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["a.weight_packed"][1][2, -1] = 0x10

    model = source(tmp_path / "m", {**matrices(33), "a.weight": bf16(np.zeros((64, 33)))}, {})
    output = quantized(model, tmp_path / "q", Options("mxfp4", layout="mxcli", on_indivisible="pad"))
    result = verified(changed(output, tmp_path / "d", change), model)
    assert found(result)["other_bytes"] == ["a.weight_packed"]
    assert "1 of 128 blocks, the first row 2, columns 32 to 32" in values(result, "other_bytes")[0]


@pytest.mark.parametrize("columns", [64, 50])
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"])
def test_values_that_overflow_by_the_rule_are_a_warning(tmp_path: Path, fmt: str, columns: int) -> None:
    model, output = made(tmp_path, fmt, columns, 3.38e38)
    result = verified(output, model)
    assert result.is_sound
    assert found(result) == {"magnitude": ["a.weight", "b.weight"], "overflow": ["a.weight", "b.weight"]}
    assert "values overflow when decoded" in values(result, "overflow")[0]


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp6_e2m3", "mxfp4"])
def test_damage_among_values_that_overflow_is_found(tmp_path: Path, fmt: str) -> None:
    def change(tensors: Tensors) -> None:
        array(tensors, "a.weight_packed", "a.weight")[5, -1] ^= 1

    model, output = made(tmp_path, fmt, 64, 3.38e38)
    result = verified(changed(output, tmp_path / "d", change), model)
    assert found(result)["finite_elsewhere"] == ["a.weight"]
    assert found(result)["overflow"] == ["b.weight"]
    assert "the first row 5, columns 32 to 63; bytes " in values(result, "other_bytes")[0]


@pytest.mark.parametrize(
    ("fmt", "places"),
    [
        ("mxfp8", "2 of 128 blocks, the first row 7, columns 0 to 31; bytes 451 to 458"),
        ("mxfp4", "2 of 128 blocks, the first row 7, columns 0 to 31; bytes 227 to 234"),
    ],
)
def test_place_and_bytes_are_those_of_the_same_difference(tmp_path: Path, fmt: str, places: str) -> None:
    """A scale in an earlier block differs too."""

    def change(tensors: Tensors) -> None:
        tensors["a.weight_scale"][1][1, 0] ^= 1
        array(tensors, "a.weight_packed", "a.weight")[7, 3] ^= 2

    def only_scale(tensors: Tensors) -> None:
        tensors["a.weight_scale"][1][1, 1] ^= 1

    model, output = made(tmp_path, fmt, 64)
    assert places in values(verified(changed(output, tmp_path / "d", change), model), "other_bytes")[0]
    (value,) = values(verified(changed(output, tmp_path / "e", only_scale), model), "other_bytes")
    assert "scales 1 of 128 bytes; 1 of 128 blocks, the first row 1, columns 32 to 63; bytes 3 to 10" in value
