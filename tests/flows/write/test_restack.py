from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines.architectures import IDS, Architecture
from lazy import Lazy, needs
from tiny_models import bf16, floats, noise, read_raw, tree, write_model

from mxcli.backends import cpu
from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.memory import RESULT_BYTES, need_of
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.dequantize import Restored, dequantize_checkpoint, memory_to_dequantize
from mxcli.flows.write.pipeline import WriteOptions
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.flows.write.restore import open_floats
from mxcli.numerics.scheme import Rules, resolve

EXPERTS = "model.layers.0.feed_forward.experts"
GATE_UP, DOWN = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
LLAMA4 = {"model_type": "llama4_text", "dtype": "bfloat16", "hidden_size": 64, "num_local_experts": 3}
QWEN = {"model_type": "qwen3_5_moe_text", "dtype": "bfloat16", "hidden_size": 64, "num_experts": 3}
OF_RECORD = (
    f"2 stacks of experts ('{GATE_UP}', …) are put together from 9 tensors of single experts, as the record of the "
    "source has them."
)


def stacks(*, in_out: bool, kind: Any = bf16, experts: int = 3) -> dict[str, Any]:
    """Experts with 32 rows of gate, 32 of up, and 64 columns."""
    gate_up = np.random.default_rng(1).standard_normal((experts, 64, 64))
    down = np.random.default_rng(2).standard_normal((experts, 64, 32))
    # Rows of one expert only are large, so that values are not equal by chance.
    gate_up[1] *= 8
    order = (0, 2, 1) if in_out else (0, 1, 2)
    return {GATE_UP: kind(gate_up.transpose(order)), DOWN: kind(down.transpose(order)), "norm.weight": noise(64)}


def one_by_one(*, experts: int = 3, bias: bool = False, module: str = EXPERTS) -> dict[str, Any]:
    """The matrices of single experts."""
    tensors = {}
    for expert in range(experts):
        for seed, (part, shape) in enumerate({"gate": (32, 64), "up": (32, 64), "down": (64, 32)}.items()):
            tensors[f"{module}.{expert}.{part}_proj.weight"] = noise(*shape, seed=10 * expert + seed)
            if bias:
                tensors[f"{module}.{expert}.{part}_proj.bias"] = noise(shape[0], seed=10 * expert + seed + 5)
    return tensors


def quantized(source: Path, output: Path, format: str, layout: str | None = None) -> Path:
    checkpoint = open_floats(source, requantize=True)
    quantize_checkpoint(checkpoint, make_plan(checkpoint, Options(format, layout=layout)), output, backend=Cpu(1))
    return output


def foreign(folder: Path) -> Path:
    """A quantized checkpoint without the record of mxcli."""
    (folder / "mxcli.json").unlink()
    return folder


def restored(source: Path, output: Path, **more: Any) -> Restored:
    return dequantize_checkpoint(open_checkpoint(source), output, backend=Cpu(1), **more)


def raw(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    return {name: each for path in folder.glob("*.safetensors") for name, each in read_raw(path).items()}


def decoded(matrix: np.ndarray, format: str, rounding: str | None = None) -> np.ndarray:
    """What the backend alone makes of the BF16 bits of a matrix, as bits again."""
    scheme = resolve(format, Rules(scale_rounding=rounding))
    return cpu.dequantize(cpu.quantize(np.ascontiguousarray(matrix), "BF16", scheme), "BF16")


@pytest.mark.parametrize(
    ("config", "in_out", "layout", "format"),
    [
        (LLAMA4, True, "compressed-tensors", "mxfp8"),
        (LLAMA4, True, "modelopt", "mxfp8"),
        (LLAMA4, True, "fp8", "mxfp8"),
        (LLAMA4, True, "quark", "mxfp4"),
        (LLAMA4, True, "compressed-tensors", "fp8_e4m3_channel"),
        (QWEN, False, "compressed-tensors", "mxfp8"),
        (QWEN, False, "quark", "mxfp4"),
        ({**LLAMA4, "model_type": "qwen3_vl_moe_text"}, True, "modelopt", "mxfp8"),
        ({**LLAMA4, "model_type": "qwen3_vl_moe_text"}, False, "modelopt", "mxfp8"),
        ({"dtype": "bfloat16", "hidden_size": 64}, False, "compressed-tensors", "mxfp4"),
    ],
)
def test_stacks_of_our_outputs_come_back_with_names_and_order_of_the_source(
    tmp_path: Path, config: dict[str, Any], in_out: bool, layout: str, format: str
) -> None:
    source = write_model(tmp_path / "m", stacks(in_out=in_out), config)
    # transformers keeps scales per row of experts in BF16, and so does this layout.
    rounding = "amax-bf16-scale" if format == "fp8_e4m3_channel" else None
    quantized(source, tmp_path / "q", format, layout)
    assert any(name.startswith(f"{EXPERTS}.2.up_proj.weight") for name in raw(tmp_path / "q"))
    result = restored(tmp_path / "q", tmp_path / "d")
    before, after = raw(source), raw(tmp_path / "d")
    assert {name: each[:2] for name, each in after.items()} == {name: each[:2] for name, each in before.items()}
    assert after["norm.weight"] == before["norm.weight"]
    for name in (GATE_UP, DOWN):
        stack = np.frombuffer(after[name][2], np.uint16).reshape(after[name][1])
        original = np.frombuffer(before[name][2], np.uint16).reshape(before[name][1])
        for expert in range(3):
            matrix, expected = (x[expert].T if in_out else x[expert] for x in (stack, original))
            np.testing.assert_array_equal(matrix, decoded(expected, format, rounding))
    assert result.notes == (OF_RECORD,)
    assert result.dtypes == {GATE_UP: "BF16", DOWN: "BF16"}


def test_the_two_halves_share_a_tensor_scale_and_come_back_in_place(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", stacks(in_out=True), LLAMA4)
    for layout in ("compressed-tensors", "modelopt"):
        quantized(source, tmp_path / layout, "nvfp4", layout)
        restored(tmp_path / layout, tmp_path / f"{layout} back")
        stack, original = (floats(raw(folder)[GATE_UP]) for folder in (tmp_path / f"{layout} back", source))
        assert stack.shape == (3, 64, 64)
        # E2M1 rounds by a sixth at most, but for the smallest values of a block.
        np.testing.assert_allclose(stack, original, rtol=0.4, atol=2)
        assert np.corrcoef(stack[:, :, :32].ravel(), original[:, :, :32].ravel())[0, 1] > 0.98


@pytest.mark.parametrize(
    ("config", "in_out", "model"),
    [
        ({"model_type": "llama4_text"}, True, "llama4_text"),
        ({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}, True, "llama4"),
        ({"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text"}}, True, "qwen3_vl_moe"),
        ({"model_type": "gemma4_text"}, False, "gemma4_text"),
        ({"model_type": "mistral4"}, False, "mistral4"),
    ],
)
def test_experts_of_other_producers_are_stacked_as_their_model_has_them(
    tmp_path: Path, config: dict[str, Any], in_out: bool, model: str
) -> None:
    source = write_model(tmp_path / "m", one_by_one(), {"num_local_experts": 3, "dtype": "bfloat16", **config})
    quantized(source, tmp_path / "q", "mxfp8", "compressed-tensors")
    result = restored(foreign(tmp_path / "q"), tmp_path / "d")
    after, before = raw(tmp_path / "d"), one_by_one()
    shapes = {GATE_UP: [3, 64, 64], DOWN: [3, 32, 64] if in_out else [3, 64, 32]}
    assert {name: each[1] for name, each in after.items()} == shapes
    for expert in range(3):
        gate, up, down = (
            decoded(before[f"{EXPERTS}.{expert}.{part}_proj.weight"][1], "mxfp8") for part in ("gate", "up", "down")
        )
        for name, expected in ((GATE_UP, np.concatenate([gate, up])), (DOWN, down)):
            stack = np.frombuffer(after[name][2], np.uint16).reshape(after[name][1])[expert]
            np.testing.assert_array_equal(stack.T if in_out else stack, expected)
    assert result.notes == (
        f"2 stacks of experts ('{GATE_UP}', …) are put together from 9 tensors of single experts, as transformers "
        f"loads models of type {model}.",
    )


@pytest.mark.parametrize("module", [EXPERTS, f"{EXPERTS}.experts"])
def test_gate_and_up_of_gpt_oss_alternate_and_biases_are_stacked(tmp_path: Path, module: str) -> None:
    config = {"model_type": "gpt_oss", "num_local_experts": 3, "dtype": "bfloat16"}
    before = one_by_one(bias=True, module=module)
    quantized(write_model(tmp_path / "m", before, config), tmp_path / "q", "mxfp8", "compressed-tensors")
    restored(foreign(tmp_path / "q"), tmp_path / "d")
    after = raw(tmp_path / "d")
    shapes = {GATE_UP: [3, 64, 64], f"{GATE_UP}_bias": [3, 64], DOWN: [3, 32, 64], f"{DOWN}_bias": [3, 64]}
    assert {name: each[1] for name, each in after.items()} == shapes
    found = {name: np.frombuffer(each[2], np.uint16).reshape(each[1]) for name, each in after.items()}
    for expert in range(3):
        of = f"{module}.{expert}"
        np.testing.assert_array_equal(
            found[GATE_UP][expert][:, ::2].T, decoded(before[f"{of}.gate_proj.weight"][1], "mxfp8")
        )
        np.testing.assert_array_equal(
            found[GATE_UP][expert][:, 1::2].T, decoded(before[f"{of}.up_proj.weight"][1], "mxfp8")
        )
        np.testing.assert_array_equal(found[DOWN][expert].T, decoded(before[f"{of}.down_proj.weight"][1], "mxfp8"))
        np.testing.assert_array_equal(found[f"{GATE_UP}_bias"][expert][::2], before[f"{of}.gate_proj.bias"][1])
        np.testing.assert_array_equal(found[f"{GATE_UP}_bias"][expert][1::2], before[f"{of}.up_proj.bias"][1])
        np.testing.assert_array_equal(found[f"{DOWN}_bias"][expert], before[f"{of}.down_proj.bias"][1])


# transformers joins the experts of these models itself, or the model is not known.
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe_text", "mixtral", "no_such_model", None])
def test_experts_of_other_models_keep_their_names(tmp_path: Path, kind: str | None) -> None:
    config = {"num_experts": 3, "dtype": "bfloat16", **({"model_type": kind} if kind else {})}
    quantized(write_model(tmp_path / "m", one_by_one(), config), tmp_path / "q", "mxfp8", "compressed-tensors")
    result = restored(foreign(tmp_path / "q"), tmp_path / "d")
    assert raw(tmp_path / "d").keys() == one_by_one().keys()
    assert result.notes == ()


def test_experts_that_the_source_had_one_by_one_come_back_so(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", one_by_one(), LLAMA4)
    quantized(source, tmp_path / "q", "mxfp8", "compressed-tensors")
    assert restored(tmp_path / "q", tmp_path / "d").notes == ()
    assert raw(tmp_path / "d").keys() == one_by_one().keys()


def test_an_output_quantized_again_is_stacked_as_its_model_is(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", stacks(in_out=True), LLAMA4)
    quantized(quantized(source, tmp_path / "q", "mxfp8"), tmp_path / "again", "mxfp4")
    result = restored(tmp_path / "again", tmp_path / "d")
    assert {name: each[1] for name, each in raw(tmp_path / "d").items()} == {
        GATE_UP: [3, 64, 64],
        DOWN: [3, 32, 64],
        "norm.weight": [64],
    }
    assert "as transformers loads models of type llama4_text" in result.notes[-1]


@pytest.mark.parametrize(
    ("missing", "config", "reason"),
    [
        ("1.up_proj", {}, "expert 1 has no up_proj.weight"),
        ("0.down_proj", {}, "expert 0 has no down_proj.weight"),
        ("2.", {}, "the source has 2 of them; the model has 3"),
        ("", {"num_local_experts": 4}, "the source has 3 of them; the model has 4"),
        ("", {"num_local_experts": None}, "the source has 3 of them; the model has an unknown number"),
    ],
)
def test_experts_that_are_not_complete_keep_their_names(
    tmp_path: Path, missing: str, config: dict[str, Any], reason: str
) -> None:
    found = {name: each for name, each in one_by_one().items() if not missing or f"experts.{missing}" not in name}
    quantized(write_model(tmp_path / "m", found, {**LLAMA4, **config}), tmp_path / "q", "mxfp8", "compressed-tensors")
    result = restored(foreign(tmp_path / "q"), tmp_path / "d")
    assert raw(tmp_path / "d").keys() == found.keys()
    assert result.notes == (
        f"'{EXPERTS}': the experts keep their own names and are not stacked, since {reason}. Loaders of this model "
        "expect stacks.",
    )


def test_experts_of_several_types_are_not_stacked(tmp_path: Path) -> None:
    tensors = {**one_by_one(), f"{EXPERTS}.1.up_proj.weight": ("F32", np.ones((32, 64), np.float32))}
    checkpoint = open_checkpoint(write_model(tmp_path / "m", tensors, LLAMA4))
    plan = make_plan(checkpoint, Options("mxfp8", layout="compressed-tensors"))
    quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu(1))
    record = json.loads((tmp_path / "q" / "mxcli.json").read_text())
    record["requantized_from"] = "modelopt"
    (tmp_path / "q" / "mxcli.json").write_text(json.dumps(record))
    assert restored(tmp_path / "q", tmp_path / "d").notes == (
        f"'{EXPERTS}': the experts keep their own names and are not stacked, since {EXPERTS}.1.up_proj.weight is F32 "
        f"[32, 64], and {EXPERTS}.0.gate_proj.weight BF16 [32, 64]. Loaders of this model expect stacks.",
    )


def test_a_record_of_another_shape_is_not_followed(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", stacks(in_out=True), LLAMA4)
    quantized(source, tmp_path / "q", "mxfp8", "compressed-tensors")
    record = json.loads((tmp_path / "q" / "mxcli.json").read_text())
    record["tensors"][DOWN]["shape"] = [3, 64, 32]
    (tmp_path / "q" / "mxcli.json").write_text(json.dumps(record))
    (note,) = restored(tmp_path / "q", tmp_path / "d").notes
    assert "since they make a stack [3, 32, 64]; the record has [3, 64, 32]" in note
    assert f"{EXPERTS}.0.down_proj.weight" in raw(tmp_path / "d")


@pytest.mark.parametrize(("dtype", "storage"), [("F16", np.float16), ("F32", np.float32)])
def test_stacks_come_back_in_the_type_they_had_or_the_one_requested(
    tmp_path: Path, dtype: str, storage: type[Any]
) -> None:
    tensors = stacks(in_out=True, kind=lambda x: (dtype, np.ascontiguousarray(x, storage)))
    quantized(write_model(tmp_path / "m", tensors, LLAMA4), tmp_path / "q", "mxfp8", "compressed-tensors")
    restored(tmp_path / "q", tmp_path / "d")
    assert {name: each[0] for name, each in raw(tmp_path / "d").items()} == {
        GATE_UP: dtype,
        DOWN: dtype,
        "norm.weight": "BF16",
    }
    restored(tmp_path / "q", tmp_path / "wide", dtype="F64")
    assert raw(tmp_path / "wide")[DOWN][0] == "F64"


def test_experts_of_a_stack_may_be_in_several_shards_and_are_read_one_at_a_time(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", stacks(in_out=True), LLAMA4)
    quantized(source, tmp_path / "whole", "mxfp8", "compressed-tensors")
    arrays = {
        name: (dtype, np.frombuffer(data, np.uint8).reshape(shape if dtype == "U8" else (*shape[:-1], -1)))
        for name, (dtype, shape, data) in read_raw(tmp_path / "whole" / "model.safetensors").items()
        if name != "norm.weight"
    }
    names = sorted(arrays, key=lambda name: name.split(".")[5:])
    shards = {f"model-0000{n}-of-00003.safetensors": {x: arrays[x] for x in names[n - 1 :: 3]} for n in (1, 2, 3)}
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    split = write_model(tmp_path / "split", shards, config)
    restored(split, tmp_path / "d")
    restored(tmp_path / "whole", tmp_path / "back")
    whole = raw(tmp_path / "back")
    assert raw(tmp_path / "d") == {name: whole[name] for name in (GATE_UP, DOWN)}
    # The stack, the codes and scales of one matrix, its values, and the stack written before it.
    stack, codes, values = 3 * 64 * 64 * 2, 32 * 64 + 32 * 2, 32 * 64 * 2
    need, alone = memory_to_dequantize(open_checkpoint(split)), need_of([], 0)
    assert need.tensor == GATE_UP
    assert need.peak_bytes - alone.peak_bytes == 2 * RESULT_BYTES + 2 * stack + codes + values


def test_a_stack_is_written_whole_hashed_and_resumed(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m", stacks(in_out=True), LLAMA4)
    quantized(source, tmp_path / "q", "mxfp8", "compressed-tensors")
    restored(tmp_path / "q", tmp_path / "whole")
    done: list[str] = []
    options = WriteOptions(stop=lambda: len(done) == 2, on_progress=lambda now, total, name: done.append(name))
    assert not restored(tmp_path / "q", tmp_path / "out", options=options).outcome.complete
    assert done == ["norm.weight", GATE_UP]
    assert restored(tmp_path / "q", tmp_path / "out", options=WriteOptions(resume=True)).outcome.complete
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    record = json.loads((tmp_path / "out" / "mxcli.json").read_text())
    assert record["schema"] == "mxcli.dequantized/3"
    assert record["notes"] == [OF_RECORD]
    assert record["dtypes"] == {GATE_UP: "BF16", DOWN: "BF16"}
    assert set(record["stored"]["model.safetensors"]) == {GATE_UP, DOWN, "norm.weight"}
    assert set(record["source_hashes"]) == set(read_raw(tmp_path / "q" / "model.safetensors"))
    assert record["accounting"]["tensors"]["dequantized"]["tensors"] == 9


@pytest.mark.parametrize("name", ["mlp.experts.fc1.weight", "block_sparse_moe.input_linear.weight"])
@pytest.mark.parametrize("layout", ["mxcli", "compressed-tensors"])
def test_stacks_that_are_not_split_stay_as_they_are(tmp_path: Path, name: str, layout: str) -> None:
    tensors = {f"model.layers.0.{name}": noise(3, 64, 96), "model.layers.0.self_attn.o_proj.weight": noise(64, 64)}
    kind = "aria_text" if "fc1" in name else "granitemoe"
    source = write_model(tmp_path / "m", tensors, {"model_type": kind, "hidden_size": 64, "dtype": "bfloat16"})
    quantized(source, tmp_path / "q", "mxfp8", layout)
    assert restored(tmp_path / "q", tmp_path / "d").notes == ()
    assert {name: each[:2] for name, each in raw(tmp_path / "d").items()} == {
        name: each[:2] for name, each in raw(source).items()
    }


sweep: Any = Lazy("engines.sweep")
_ROPE = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [4, 6, 6]}
_GEMMA4 = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 4, "moe_intermediate_size": 128}
MODELS = (
    Architecture("", "Llama4ForCausalLM"),
    Architecture(
        "",
        "Qwen3VLMoeForConditionalGeneration",
        {"vision_config": {"out_hidden_size": 64}, "text_config": {"rope_parameters": _ROPE}},
    ),
    Architecture(
        "", "Gemma4ForCausalLM", {**_GEMMA4, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 32}
    ),
    Architecture("", "GraniteMoeForCausalLM", {"attention_multiplier": 0.125}),
    Architecture("", "AriaTextForCausalLM", {"moe_num_experts": 4, "moe_topk": 4}, IDS),
)


@pytest.mark.slow
@needs("accelerate", "compressed_tensors", "torch", "transformers")
@pytest.mark.parametrize("row", MODELS, ids=str)
def test_transformers_loads_what_is_dequantized(row: Architecture, tmp_path: Path) -> None:
    model = sweep.source(row, tmp_path / "m")
    for layout, format in (("compressed-tensors", "mxfp8"), ("compressed-tensors", "nvfp4"), ("modelopt", "nvfp4")):
        said = sweep.mxcli("quantize", model.folder, "--format", format, "--layout", layout, "-o", tmp_path / "q",
                           "--json", "--threads", 1)  # fmt: skip
        assert said.code == 0, said.err
        bound = sweep.allowed_error(*sweep.measured(said))
        for record in (True, False):
            if not record:
                foreign(tmp_path / "q")
            assert sweep.mxcli("dequantize", tmp_path / "q", "-o", tmp_path / "d").code == 0
            loaded = sweep.load(row, tmp_path / "d")
            assert not loaded.faults
            assert sweep.relative_error(loaded.output, model.loaded.output) <= bound
            shutil.rmtree(tmp_path / "d")
        shutil.rmtree(tmp_path / "q")
