"""PyTorch checkpoints: weights only, names flattened, nothing of the file is run."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mxcli.errors import EnvironmentFailure, InputError
from mxcli.files.checkpoint import open_checkpoint, read
from mxcli.files.tensors import IN_MEMORY

torch = pytest.importorskip("torch")

LEGACY = {"_use_new_zipfile_serialization": False}


class Code:
    """A class only the writer knows."""


class Command:
    """A pickle that would run a command when loaded without care."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("ran"),))


def _weights() -> dict[str, object]:
    square = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "net.1": {
            "lstm": {"weight_ih_l0": square},
            "transposed": square.t(),
            "rows": square[1:3],
            "column": square[:, 2],
            "bf16": torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16),
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 5),
        },
        "more": {"state": {0: {"mean": torch.ones(2)}, 1: {"step": 7}}},
        "list": [torch.tensor([1, 2]), "text", None],
        "epoch": 3,
    }


EXPECTED = {
    "net.1.lstm.weight_ih_l0": ("F32", np.arange(24.0).reshape(4, 6).tolist()),
    "net.1.transposed": ("F32", np.arange(24.0).reshape(4, 6).T.tolist()),
    "net.1.rows": ("F32", np.arange(6.0, 18.0).reshape(2, 6).tolist()),
    "net.1.column": ("F32", [2.0, 8.0, 14.0, 20.0]),
    "net.1.bf16": ("BF16", [[0x3F80, 0xC000]]),
    "net.1.scalar": ("F32", 2.5),
    "net.1.empty": ("F32", []),
    "more.state.0.mean": ("F32", [1.0, 1.0]),
    "list.0": ("I64", [1, 2]),
}


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", ["a.pt", "a.pth", "pytorch_model.bin", "a"])
def test_nested_containers_are_flattened(tmp_path: Path, name: str, options: dict[str, bool]) -> None:
    path = tmp_path / name
    torch.save(_weights(), path, **options)
    checkpoint = open_checkpoint(path)
    assert checkpoint.kind == "pytorch"
    arrays = {tensor: (info.dtype, read(checkpoint, info)) for tensor, info in checkpoint.tensors.items()}
    assert {tensor: (dtype, array.tolist()) for tensor, (dtype, array) in arrays.items()} == EXPECTED
    assert all(array.flags.c_contiguous and not array.flags.writeable for _, array in arrays.values())
    assert checkpoint.tensors["net.1.empty"].shape == (0, 5)
    assert checkpoint.tensors["net.1.lstm.weight_ih_l0"].role == "weight"
    assert f"{path}: 4 values that are not tensors (steps, options, names) are not read." in checkpoint.notes


def test_tensors_of_the_zip_format_are_in_place(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(_weights(), path)
    checkpoint = open_checkpoint(path)
    in_place = {name for name, info in checkpoint.tensors.items() if info.offset != IN_MEMORY}
    assert in_place == EXPECTED.keys() - {"net.1.transposed", "net.1.column", "net.1.empty"}
    info = checkpoint.tensors["net.1.rows"]
    stored = path.read_bytes()[info.offset : info.offset + info.nbytes]
    assert np.frombuffer(stored, "<f4").tolist() == list(range(6, 18))


def test_narrow_dtypes(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    packed = torch.tensor([[0x21, 0x43]], dtype=torch.uint8)
    tensors = {
        "e4m3": torch.tensor([448.0]).to(torch.float8_e4m3fn),
        "e8m0": torch.tensor(127, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "f4": packed.view(torch.float4_e2m1fn_x2),
        "strided": torch.tensor([1.0, 2.0, 3.0]).to(torch.float8_e5m2)[::2],
    }
    torch.save(tensors, path)
    checkpoint = open_checkpoint(path)
    found = {n: (i.dtype, i.shape, read(checkpoint, i).tolist()) for n, i in checkpoint.tensors.items()}
    assert found == {
        "e4m3": ("F8_E4M3", (1,), [0x7E]),
        "e8m0": ("F8_E8M0", (), 127),
        "f4": ("F4", (1, 4), [[0x21, 0x43]]),
        "strided": ("F8_E5M2", (2,), [0x3C, 0x42]),
    }


def _views() -> dict[str, tuple[object, list[object]]]:
    """Views of one storage by name, with what they hold."""
    square = torch.arange(6.0).reshape(2, 3)
    return {
        "transposed": (square.t(), [[0, 3], [1, 4], [2, 5]]),
        "sliced": (square[:, ::2], [[0, 2], [3, 5]]),
        "expanded": (square[1:, :1].expand(2, 2), [[3, 3], [3, 3]]),
        "overlapping": (square.as_strided((2, 2), (1, 1)), [[0, 1], [1, 2]]),
        "negative bit": (torch._neg_view(square), [[0, -1, -2], [-3, -4, -5]]),
        "imaginary": (torch.complex(square, square).conj().imag, [[0, -1, -2], [-3, -4, -5]]),
        "negative bit of a slice": (torch._neg_view(square[1:, 1:]), [[-4, -5]]),
        "narrow": (square.bfloat16().t()[1:], [[0x3F80, 0x4080], [0x4000, 0x40A0]]),
    }


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", _views())
def test_strided_tensors_are_read_as_they_look(tmp_path: Path, name: str, options: dict[str, bool]) -> None:
    tensor, values = _views()[name]
    torch.save({"x": tensor}, tmp_path / "a.pt", **options)
    checkpoint = open_checkpoint(tmp_path / "a.pt")
    array = read(checkpoint, checkpoint.tensors["x"])
    assert array.tolist() == values
    assert array.flags.c_contiguous


def test_an_expanded_tensor_that_memory_does_not_hold_is_named(tmp_path: Path) -> None:
    """It is refused before anything is read of it: the file has 4 bytes of it."""
    torch.save({"x": torch.zeros(1).expand(10**8, 10**8)}, tmp_path / "a.pt")
    with pytest.raises(
        EnvironmentFailure,
        match=r"'x', stored with strides \[0, 0\], needs 40,000,000,000,000,000 bytes of memory, and there are [\d,]+; "
        r"save it without expand\(\), as the 1 elements that it has",
    ):
        open_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
def test_an_expanded_tensor_is_read_if_there_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]
) -> None:
    """Views of 1000 numbers with a million elements each, and a plain tensor, which is not limited."""
    row = torch.arange(1000.0)
    tensors = {
        "rows": row.expand(1000, 1000),
        "overlapping": row.as_strided((500, 500), (1, 1)),
        "plain": torch.ones(2000),
    }
    torch.save(tensors, tmp_path / "a.pt", **options)
    checkpoint = open_checkpoint(tmp_path / "a.pt")
    assert read(checkpoint, checkpoint.tensors["rows"])[999, 7] == 7
    monkeypatch.setattr("mxcli.files.pytorch.free_memory", lambda: 3_999_999)
    with pytest.raises(
        EnvironmentFailure, match=r"'rows', .* needs 4,000,000 bytes of memory, and there are 3,999,999; "
    ):
        read(checkpoint, checkpoint.tensors["rows"])
    assert read(checkpoint, checkpoint.tensors["overlapping"])[3, 4] == 7
    monkeypatch.setattr("mxcli.files.pytorch.free_memory", lambda: 10)
    with pytest.raises(EnvironmentFailure, match=r"strides \[1, 1\], needs 1,000,000 bytes"):
        read(checkpoint, checkpoint.tensors["overlapping"])
    assert read(checkpoint, checkpoint.tensors["plain"]).sum() == 2000


def test_shared_storage_is_a_tie(tmp_path: Path) -> None:
    embedding = torch.randn(8, 4)
    path = tmp_path / "a.pt"
    torch.save({"embed.weight": embedding, "lm_head.weight": embedding, "view": embedding[:2]}, path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.tied == {"lm_head.weight": "embed.weight"}
    assert list(checkpoint.tensors) == ["embed.weight", "lm_head.weight", "view"]
    assert checkpoint.notes == ("1 tensor ('lm_head.weight') sharing the storage of another; listed under each name.",)
    same = [read(checkpoint, checkpoint.tensors[name]).tolist() for name in ("embed.weight", "lm_head.weight")]
    assert same == [embedding.tolist()] * 2


def test_parameters_modules_and_single_tensors(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "linear.pt")
    assert list(open_checkpoint(tmp_path / "linear.pt").tensors) == ["weight", "bias"]
    torch.save(torch.nn.Parameter(torch.ones(2, 2)), tmp_path / "one.pt")
    assert list(open_checkpoint(tmp_path / "one.pt").tensors) == ["one"]
    torch.save({"c": torch.tensor([1 + 2j]).conj()}, tmp_path / "conj.pt")
    checkpoint = open_checkpoint(tmp_path / "conj.pt")
    assert read(checkpoint, checkpoint.tensors["c"]).tolist() == [1 - 2j]


def test_sharded_directories(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2, 2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b.weight": torch.ones(2, 2)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    torch.save({"x": 1}, tmp_path / "training_args.bin")
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["a.weight", "b.weight"]
    state = (tmp_path / "training_args.bin").stat().st_size
    assert f"training_args.bin is training state ({state:,} bytes); not read." in checkpoint.notes
    index = (
        '{"metadata": {"total_size": 32}, "weight_map": {"a.weight": "pytorch_model-00001-of-00002.bin",'
        ' "b.weight": "pytorch_model-00002-of-00002.bin"}}'
    )
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    indexed = open_checkpoint(tmp_path)
    assert indexed.tensors == checkpoint.tensors
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(InputError, match=r"pytorch_model-00002-of-00002\.bin: no such file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
def test_pickles_that_need_code_are_refused(tmp_path: Path, options: dict[str, bool]) -> None:
    path = tmp_path / "code.pt"
    torch.save({"w": torch.ones(2), "config": Code()}, path, **options)
    with pytest.raises(InputError, match=r"its pickle needs code \(\S+Code\), which is never run; save the") as caught:
        open_checkpoint(path)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("protocol", [2, 4])
def test_commands_in_pickles_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pt"
    path.write_bytes(pickle.dumps({"w": Command()}, protocol=protocol))
    with pytest.raises(InputError, match=r"evil\.pt: "):
        open_checkpoint(path)
    assert not (tmp_path / "ran").exists()


def test_torchscript_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "script.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("script/constants.pkl", b"\x80\2).")
        archive.writestr("script/code/__torch__.py", "class M: pass")
    with pytest.raises(InputError, match=r"a TorchScript archive, which holds code; save its state_dict\(\)"):
        open_checkpoint(path)


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
@pytest.mark.parametrize("kept", [0, 1, 40, -100])
def test_truncated_files_are_named(tmp_path: Path, options: dict[str, bool], kept: int) -> None:
    path = tmp_path / "cut.pt"
    torch.save({"w": torch.ones(1000)}, path, **options)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match=r"cut\.pt: (truncated|empty|not a weights-only)") as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 12\n", "a Git LFS pointer"),
        (b"<html></html>", "an HTML page"),
        (b"just some text, long enough", "damaged or not a PyTorch checkpoint"),
        (b"GGUF" + bytes(40), "a GGUF file"),
    ],
)
def test_foreign_files_are_recognised(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(InputError, match=fault):
        open_checkpoint(path)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_tensors_without_counterpart_are_all_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.pt"
    tensors = {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "double complex": torch.ones(2, dtype=torch.complex128),
        "fine": torch.ones(2),
    }
    torch.save(tensors, path)
    with pytest.raises(InputError) as caught:
        open_checkpoint(path)
    assert [detail.removeprefix(f"{path}: ") for detail in caught.value.details] == [
        "tensor 'sparse': sparse_coo float32 tensors cannot be read; save it as a dense float tensor.",
        "tensor 'meta': without data tensors cannot be read; save it as a dense float tensor.",
        "tensor 'nested': nested float32 tensors cannot be read; save it as a dense float tensor.",
        "tensor 'double complex': dtype complex128 has no safetensors counterpart; convert it to float32.",
    ]


def test_clashing_names_and_endless_nesting_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, path)
    with pytest.raises(InputError, match=r"two tensors flatten to the name 'a\.b'"):
        open_checkpoint(path)
    cycle: dict[str, object] = {"w": torch.ones(1)}
    cycle["self"] = cycle
    torch.save(cycle, path)
    with pytest.raises(InputError, match="nest without end"):
        open_checkpoint(path)
    torch.save({"step": 3}, path)
    with pytest.raises(InputError, match="holds no tensors, only 1 other values"):
        open_checkpoint(path)
