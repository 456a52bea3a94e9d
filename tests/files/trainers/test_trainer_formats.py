"""Formats of several files are named with the program that makes a checkpoint of them, by the names of their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from raw_checkpoint import safetensors_bytes, zeros

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint

Writer = Callable[..., Path]
TENSORS = safetensors_bytes({"fc.weight": zeros("BF16", 4, 8)}, {"format": "pt"})

# What a folder holds, the beginning of the sentence after its name, and the way out in it.
FOLDERS: dict[str, tuple[list[str], str, str]] = {
    "DCP": (
        [".metadata", "__0_0.distcp", "__1_0.distcp"],
        "a checkpoint of torch.distributed.checkpoint, whose files hold parts of tensors (__0_0.distcp, "
        "__1_0.distcp); ",
        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {root} OUT.pt.",
    ),
    "Trainer with FSDP": (
        ["pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/__0_0.distcp",
         "scheduler.pt", "rng_state_0.pth", "trainer_state.json", "training_args.bin"],
        "a checkpoint of torch.distributed.checkpoint, whose files hold parts of tensors "
        "(pytorch_model_fsdp_0/__0_0.distcp); ",
        "dcp_to_torch {root}/pytorch_model_fsdp_0 OUT.pt.",
    ),
    "torchtitan": (
        ["step-1000/.metadata", "step-1000/__0_0.distcp"],
        "a checkpoint of torch.distributed.checkpoint, whose files hold parts of tensors (step-1000/__0_0.distcp); ",
        "dcp_to_torch {root}/step-1000 OUT.pt.",
    ),
    "ZeRO 3": (
        ["latest", "zero_to_fp32.py", "global_step10/zero_pp_rank_0_mp_rank_00_model_states.pt",
         "global_step10/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
        "a checkpoint of DeepSpeed (ZeRO), whose ranks each hold a part "
        "(global_step10/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt, "
        "global_step10/zero_pp_rank_0_mp_rank_00_model_states.pt); ",
        "python zero_to_fp32.py {root} OUT --safe_serialization",
    ),
    "ZeRO 2": (
        ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
        "a checkpoint of DeepSpeed (ZeRO), whose ranks each hold a part (zero_pp_rank_0_mp_rank_00_optim_states.pt); ",
        "python zero_to_fp32.py {above} OUT --safe_serialization",
    ),
    "Trainer with ZeRO": (
        ["global_step5/zero_pp_rank_0_mp_rank_00_model_states.pt", "latest", "rng_state_0.pth", "scheduler.pt",
         "training_args.bin", "config.json"],
        "a checkpoint of DeepSpeed (ZeRO), whose ranks each hold a part "
        "(global_step5/zero_pp_rank_0_mp_rank_00_model_states.pt); ",
        "python zero_to_fp32.py {root} OUT",
    ),
    "DeepSpeed with tensor parallelism": (
        ["global_step3/mp_rank_00_model_states.pt", "global_step3/mp_rank_01_model_states.pt", "latest"],
        "a checkpoint of DeepSpeed for several devices (global_step3/mp_rank_00_model_states.pt, "
        "global_step3/mp_rank_01_model_states.pt); ",
        "ds_to_universal.py of DeepSpeed.",
    ),
    "DeepSpeed's pipelines": (
        ["global_step3/layer_00-model_00-model_states.pt", "global_step3/layer_02-model_00-model_states.pt", "latest"],
        "a checkpoint of DeepSpeed's pipelines, with a file of each layer "
        "(global_step3/layer_00-model_00-model_states.pt, global_step3/layer_02-model_00-model_states.pt); ",
        "convert_neox_to_hf.py).",
    ),
    "Megatron": (
        ["latest_checkpointed_iteration.txt", "iter_0000010/mp_rank_00/model_optim_rng.pt",
         "iter_0000010/mp_rank_01/model_optim_rng.pt"],
        "a checkpoint of Megatron (iter_0000010/mp_rank_00/model_optim_rng.pt, "
        "iter_0000010/mp_rank_01/model_optim_rng.pt); ",
        "Megatron Bridge (AutoBridge.export_ckpt) or tools/checkpoint/convert.py of Megatron-LM.",
    ),
    "Megatron with pipelines": (
        ["iter_0000010/mp_rank_00_001/model_optim_rng.pt", "iter_0000010/mp_rank_00_001/distrib_optim.pt"],
        "a checkpoint of Megatron (iter_0000010/mp_rank_00_001/distrib_optim.pt, "
        "iter_0000010/mp_rank_00_001/model_optim_rng.pt); ",
        "tools/checkpoint/convert.py",
    ),
    "one rank of Megatron": (["mp_rank_00/model_optim_rng.pt"], "a checkpoint of Megatron (", "Megatron Bridge"),
    "Megatron Core": (
        ["latest_checkpointed_iteration.txt", "iter_0000010/.metadata", "iter_0000010/__0_0.distcp",
         "iter_0000010/common.pt", "iter_0000010/metadata.json"],
        "a checkpoint of Megatron (latest_checkpointed_iteration.txt); ",
        "Megatron Bridge",
    ),
    "an iteration of Megatron Core": (
        [".metadata", "__0_0.distcp", "common.pt", "metadata.json"],
        "a checkpoint of Megatron (common.pt); ",
        "Megatron Bridge",
    ),
    "NeMo 2": (
        ["context/model.yaml", "context/io.json", "weights/.metadata", "weights/__0_0.distcp", "weights/common.pt"],
        "a checkpoint of NeMo (context/io.json, context/model.yaml); ",
        "nemo.collections.llm.export_ckpt with target='hf'",
    ),
    "NeMo 2, zarr": (
        ["context/model.yaml", "weights/module.decoder.weight/.zarray"],
        "a checkpoint of NeMo (context/model.yaml); ",
        "export_ckpt",
    ),
    "an archive of NeMo": (["llama.nemo"], "a checkpoint of NeMo (llama.nemo); ", "convert_*_nemo_to_hf.py"),
    "an unpacked archive of NeMo": (
        ["model_config.yaml", "model_weights/common.pt", "model_weights/metadata.json"],
        "an unpacked checkpoint of NeMo (model_config.yaml); ",
        "export_ckpt",
    ),
    "Meta": (
        ["consolidated.00.pth", "consolidated.01.pth", "params.json", "tokenizer.model"],
        "Meta's slices of a model for several devices, each with a part of every matrix (consolidated.00.pth, "
        "consolidated.01.pth); ",
        "join them with convert_llama_weights_to_hf.py of transformers (--input_dir {root} --output_dir OUT; ",
    ),
    "Meta, in a folder": (
        ["original/consolidated.00.pth", "original/consolidated.01.pth", "config.json"],
        "Meta's slices of a model for several devices, each with a part of every matrix (original/consolidated.00.pth, "
        "original/consolidated.01.pth); ",
        "--input_dir {root}/original --output_dir OUT",
    ),
    "DeepSeek": (
        ["model0-mp2.safetensors", "model1-mp2.safetensors", "tokenizer.json"],
        "DeepSeek's slices of a model for several devices, each with a part of every matrix (model0-mp2.safetensors, "
        "model1-mp2.safetensors); ",
        "give the Hugging Face checkpoint that they were made from",
    ),
    "vLLM": (
        ["config.json", "model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"],
        "vLLM's slices of a model for several devices, each with a part of every matrix (sharded_state) (",
        "give the checkpoint that they were made from",
    ),
    "TensorRT-LLM": (
        ["config.json", "rank0.safetensors", "rank1.safetensors"],
        "TensorRT-LLM's slices of a model for several devices, each with a part of every matrix (rank0.safetensors, "
        "rank1.safetensors); ",
        "convert_checkpoint.py.",
    ),
    "Grok": (
        ["pytorch_model-00000-TP-000.safetensors", "pytorch_model-00000-TP-001.safetensors"],
        "slices of a model for several devices, each with a part of every matrix, as of Grok (",
        "give a checkpoint of whole tensors.",
    ),
    "metaseq": (
        ["reshard-model_part-0.pt", "reshard-model_part-1.pt"],
        "metaseq's slices of a model for several devices, each with a part of every matrix (reshard-model_part-0.pt, "
        "reshard-model_part-1.pt); ",
        "metaseq.scripts.convert_to_singleton.",
    ),
    "FSDP's local state": (
        ["pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin"],
        "a checkpoint of FSDP, whose ranks each hold a part (pytorch_model_fsdp_rank0.bin, "
        "pytorch_model_fsdp_rank1.bin); ",
        "full state dict",
    ),
    "Orbax": (
        ["_CHECKPOINT_METADATA", "default/manifest.ocdbt", "default/ocdbt.process_0/d/0123"],
        "a checkpoint of Orbax (JAX) (_CHECKPOINT_METADATA, default/manifest.ocdbt); ",
        "restore it with orbax.checkpoint",
    ),
    "TensorFlow": (
        ["bert_model.ckpt.data-00000-of-00001", "bert_model.ckpt.index", "bert_model.ckpt.meta", "vocab.txt"],
        "a checkpoint of TensorFlow (bert_model.ckpt.data-00000-of-00001); ",
        "tf.train.load_checkpoint",
    ),
    "TensorFlow's saved model": (
        ["saved_model.pb", "variables/variables.data-00000-of-00001", "variables/variables.index"],
        "a checkpoint of TensorFlow (saved_model.pb, variables/variables.data-00000-of-00001); ",
        "tf.train.load_checkpoint",
    ),
    "PaddlePaddle": (["model_state.pdparams"], "a checkpoint of PaddlePaddle (", "paddle.load"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_are_named_with_their_converter(model: Writer, name: str) -> None:
    files, what, way_out = FOLDERS[name]
    root = model(dict.fromkeys(files, TENSORS))
    with pytest.raises(InputError) as caught:
        open_checkpoint(root)
    said = str(caught.value)
    assert said.startswith(f"{root}: {what}")
    assert way_out.format(root=root, above=root.parent) in said
    assert said.endswith(".")
    assert "\n" not in said
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("files", "given", "said"),
    [
        (["consolidated.00.pth", "consolidated.01.pth"], "consolidated.01.pth", "Meta's slices of a model for several"),
        (["__0_0.distcp", ".metadata"], "__0_0.distcp", "a checkpoint of torch.distributed.checkpoint, whose files"),
        (["x.nemo"], "x.nemo", "a checkpoint of NeMo; convert it with NeMo"),
        (["mp_rank_00/model_optim_rng.pt"], "mp_rank_00/model_optim_rng.pt", "a checkpoint of Megatron; convert it"),
        (
            ["global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt"],
            "global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt",
            "a checkpoint of DeepSpeed (ZeRO), whose ranks each hold a part; make a checkpoint of it",
        ),
        (["rank0.safetensors", "rank1.safetensors"], "rank1.safetensors", "TensorRT-LLM's slices of a model"),
        (
            ["model0-mp2.safetensors", "model1-mp2.safetensors"],
            "model0-mp2.safetensors",
            "DeepSeek's slices of a model",
        ),
        (["saved_model.pb"], "saved_model.pb", "a checkpoint of TensorFlow; read it"),
    ],
)
def test_one_file_of_several(
    model: Writer, monkeypatch: pytest.MonkeyPatch, files: list[str], given: str, said: str
) -> None:
    root = model(dict.fromkeys(files, TENSORS))
    with pytest.raises(InputError) as caught:
        open_checkpoint(root / given)
    assert str(caught.value).startswith(f"{root / given}: {said}")
    monkeypatch.chdir((root / given).parent)
    with pytest.raises(InputError) as caught:
        open_checkpoint((root / given).name)
    assert str(caught.value).startswith(f"{(root / given).name}: {said}")


@pytest.mark.parametrize(
    "files",
    [
        ["consolidated.00.pth", "params.json"],
        ["consolidated.safetensors", "params.json"],
        ["rank0.safetensors", "config.json"],
        ["model0-mp1.safetensors"],
        ["mp_rank_00_model_states.pt"],
        ["model.safetensors", "global_step5/zero_pp_rank_0_mp_rank_00_model_states.pt", "latest", "zero_to_fp32.py"],
        ["model.safetensors", "original/consolidated.00.pth", "original/consolidated.01.pth"],
        ["pytorch_model.bin", "pytorch_model_fsdp_0/__0_0.distcp", "optimizer.bin"],
        ["model.safetensors", "saved_model.pb", "flax_model.msgpack"],
        ["model_weights.ckpt", "model_config.yaml"],
    ],
)
def test_whole_models_next_to_such_files_are_read(model: Writer, files: list[str]) -> None:
    root = model({name: TENSORS if "config" not in name else "{}" for name in files})
    for name in files:
        if name.endswith((".pth", ".pt", ".bin", ".ckpt")):
            torch.save({"fc.weight": torch.ones(4, 8)}, root / name)
    assert list(open_checkpoint(root).tensors) == ["fc.weight"]


def test_a_folder_that_can_be_read_is_given_first(model: Writer) -> None:
    zero = "checkpoint-500/global_step500/zero_pp_rank_0_mp_rank_00_model_states.pt"
    root = model({"checkpoint-500/model.safetensors": TENSORS, zero: b"x", "trainer_state.json": "{}"})
    with pytest.raises(InputError, match=r"no weights in it, but in its folders checkpoint-500; give one of those\."):
        open_checkpoint(root)


def test_several_whole_checkpoints_in_a_folder(model: Writer) -> None:
    root = model({})
    root.mkdir()
    for name in ("epoch=1-step=10.ckpt", "last.ckpt"):
        torch.save({"state_dict": {"fc.weight": torch.ones(2, 2)}}, root / name)
    with pytest.raises(
        InputError, match=r"2 files \(epoch=1-step=10\.ckpt, last\.ckpt\) are separate models; give one of"
    ):
        open_checkpoint(root)
    assert list(open_checkpoint(root / "last.ckpt").tensors) == ["fc.weight"]


STATE = {
    "optimizer.pt": {"state": {0: {"exp_avg": torch.zeros(4, 8)}}, "param_groups": []},
    "scheduler.pt": {"last_epoch": 1},
    "rng_state_0.pth": {"cpu": torch.zeros(10, dtype=torch.uint8)},
    "scaler.pt": {"scale": torch.ones(1)},
    "training_args.bin": {"x": 1},
}


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors", "pytorch_model-00001-of-00001.bin"])
def test_the_folder_of_a_trainer(model: Writer, weights: str) -> None:
    root = model({"config.json": {"model_type": "llama"}, "trainer_state.json": {}, "model.safetensors": TENSORS})
    if weights.endswith(".bin"):
        (root / "model.safetensors").unlink()
        torch.save({"fc.weight": torch.ones(4, 8)}, root / weights)
    for name, state in STATE.items():
        torch.save(state, root / name)
    nbytes = sum((root / name).stat().st_size for name in STATE)
    checkpoint = open_checkpoint(root)
    assert list(checkpoint.tensors) == ["fc.weight"]
    listed = "optimizer.pt, rng_state_0.pth, scaler.pt, scheduler.pt, training_args.bin"
    assert f"{listed} are training state ({nbytes:,} bytes); not read." in checkpoint.notes


def test_a_folder_of_training_state_alone(model: Writer) -> None:
    root = model({"config.json": {}})
    for name, state in STATE.items():
        torch.save(state, root / name)
    with pytest.raises(InputError) as caught:
        open_checkpoint(root)
    assert str(caught.value) == (
        f"{root}: no weights in it, only training state (optimizer.pt, rng_state_0.pth, scaler.pt, scheduler.pt, "
        "training_args.bin); give a model."
    )
