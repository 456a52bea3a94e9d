"""What is carried along of a model's folder, and why the rest is not: a row is a file that people have there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raw_checkpoint import zeros

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.model_folder import carried_tensors, left_out_notes

Writer = Callable[..., Path]
A, B = zeros("BF16", 4, 8), zeros("F32", 2)
MODEL: dict[str, Any] = {"model.safetensors": {"a.weight": A, "b.weight": B}, "config.json": {}}
COPY, FORMAT, STATE = "another copy of the weights", "the model in another format", "training state"
MAKER, SETTINGS = "the same model under its maker's own names", "an old quantization config"


def carried(model: Writer, files: dict[str, Any]) -> list[str]:
    root = model(files)
    return [path.relative_to(root).as_posix() for path in open_checkpoint(root).side_files]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("2_Dense/model.safetensors", {"linear.weight": A}),
        ("2_Dense/pytorch_model.bin", b"x"),
        ("2_Dense/config.json", "{}"),
        ("modules.json", "[]"),
        ("spk_dict.pt", b"x"),
        ("voices/af_heart.pt", b"x"),
        ("vocoder/generator.pth", b"x"),
        ("flow.pt", b"x"),
        ("campplus.onnx", b"x"),
        ("speaker_embeddings.npz", b"x"),
        ("mtp.safetensors", {"mtp.fc.weight": A}),
        ("model-mtp.safetensors", {"model.mtp_layers.0.weight": A}),
        ("model-mtp-00001-of-00001.safetensors", {"mtp.layers.0.weight": A}),
        ("speech-lora/adapter_model.safetensors", {"lora_A.weight": A}),
        ("adapter_model.safetensors", {"lora_A.weight": A}),
        ("model-00003-of-00003.safetensors", {"visual.patch.weight": A}),
        ("a_copy_with_more.safetensors", {"a.weight": A, "c.weight": A}),
        ("other_shape.safetensors", {"a.weight": zeros("BF16", 2, 8)}),
        ("mmproj-model-f16.gguf", b"GGUF"),
        ("spiece.model", b"x"),
        ("bpe.codes", "x"),
        ("lang_codes.bin", b"x"),
        ("preprocessor_config.json", "{}"),
        ("modeling_x.py", "x"),
        ("assets/figure.png", b"x"),
        ("original/params.json", "{}"),
        ("scheduler/scheduler_config.json", "{}"),
        ("LICENSE", "x"),
    ],
)
def test_what_a_loader_may_need_is_carried(model: Writer, name: str, content: object) -> None:
    assert carried(model, MODEL | {name: content}) == [name]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("pytorch_model.bin", b"x", COPY),
        ("pytorch_model-00001-of-00002.bin", b"x", COPY),
        ("pytorch_model.bin.index.json", "{}", COPY),
        ("pytorch_model.fp16.bin", b"x", COPY),
        ("model.fp16.safetensors", {"a.weight": A}, COPY),
        ("diffusion_pytorch_model.non_ema.safetensors", {"a.weight": A, "b.weight": B}, COPY),
        ("again.safetensors", {"b.weight": B}, COPY),
        ("model.pt", b"x", COPY),
        ("model.ckpt", b"x", COPY),
        ("onnx", {"onnx/model.onnx": b"x", "onnx/config.json": "{}"}, FORMAT),
        ("openvino", {"openvino/openvino_model.bin": b"x"}, FORMAT),
        ("openvino_model.xml", "x", FORMAT),
        ("openvino_model.bin", b"x", FORMAT),
        ("model.onnx", b"x", FORMAT),
        ("decoder_model_merged.onnx", b"x", FORMAT),
        ("model.onnx_data", b"x", FORMAT),
        ("tf_model.h5", b"x", FORMAT),
        ("flax_model.msgpack", b"x", FORMAT),
        ("rust_model.ot", b"x", FORMAT),
        ("bert_model.ckpt.index", b"x", FORMAT),
        ("bert_model.ckpt.data-00000-of-00001", b"x", FORMAT),
        ("Model-Q4_K_M.gguf", b"GGUF", FORMAT),
        ("coreml/model.mlpackage", b"x", FORMAT),
        ("original/consolidated.00.pth", b"x", MAKER),
        ("original/model--00001-of-00002.safetensors", {"x": A}, MAKER),
        ("metal/model.bin", b"x", MAKER),
        ("consolidated.safetensors", {"layers.0.wq.weight": A}, MAKER),
        ("optimizer.pt", b"x", STATE),
        ("optimizer.bin", b"x", STATE),
        ("scheduler.pt", b"x", STATE),
        ("rng_state_0.pth", b"x", STATE),
        ("training_args.bin", b"x", STATE),
        ("trainer_state.json", "{}", STATE),
        ("checkpoint-500", {"checkpoint-500/model.safetensors": {"a.weight": A}}, STATE),
        ("global_step1000", {"global_step1000/x.pt": b"x"}, STATE),
        ("runs/events.out.tfevents.1", b"x", STATE),
        ("hf_quant_config.json", "{}", SETTINGS),
        ("quantize_config.json", "{}", SETTINGS),
        ("quantization_config.json", "{}", SETTINGS),
        ("quantization_map.json", "{}", SETTINGS),
        ("recipe.yaml", "x", SETTINGS),
        (".cache", {".cache/huggingface/x.json": "{}"}, "hidden"),
        (".git", {".git/lfs/objects/x": b"x"}, "hidden"),
        (".gitattributes", "x", "hidden"),
        ("sub/.DS_Store", "x", "hidden"),
        ("__pycache__", {"__pycache__/x.pyc": b"x"}, "compiled code"),
        ("mxcli.json", "{}", "the record of an earlier output"),
        ("model.safetensors.partial", b"x", "left by an unfinished run"),
        ("model.safetensors.incomplete", b"x", "unfinished"),
        ("model.safetensors.index.fp16.json", "{}", "an index of other weights"),
    ],
)
def test_what_no_loader_of_an_output_needs_is_left_out_with_the_reason(
    model: Writer, name: str, content: Any, reason: str
) -> None:
    root = model(MODEL | (content if isinstance(content, dict) and "/" in next(iter(content)) else {name: content}))
    checkpoint = open_checkpoint(root)
    assert (checkpoint.side_files, dict(checkpoint.left_out)) == ((), {reason: [name.removesuffix("/model.mlpackage")]})


def test_pytorch_weights_alone_in_a_subfolder_are_carried_but_not_next_to_safetensors(model: Writer) -> None:
    both = {"2_Dense/model.safetensors": {"linear.weight": A}, "2_Dense/pytorch_model.bin": b"x"}
    assert carried(model, MODEL | both) == ["2_Dense/model.safetensors"]


def test_tensors_next_to_the_model_are_known_to_stay_plain(model: Writer) -> None:
    files = {"mtp.safetensors": {"mtp.fc.weight": A}, "broken.safetensors": b"x", "2_Dense/model.safetensors": {"w": A}}
    checkpoint = open_checkpoint(model(MODEL | files))
    found = carried_tensors(checkpoint.root, checkpoint.side_files)
    assert [(info.name, info.shape) for info in found] == [("mtp.fc.weight", (4, 8))]


@pytest.mark.parametrize("name", ["more.safetensors", "model.fp16.safetensors", "x.onnx", "y.pt"])
def test_what_is_not_a_file_is_not_read(model: Writer, name: str) -> None:
    root = model(MODEL)
    os.mkfifo(root / name)
    assert open_checkpoint(root).side_files == ()
    (root / name).unlink()
    (root / name).symlink_to(name)
    assert open_checkpoint(root).side_files == ()


def test_weights_out_of_the_source_are_not_carried(model: Writer, tmp_path: Path) -> None:
    root = model(MODEL | {"../elsewhere/spk.safetensors": {"spk": A}})
    (root / "spk.safetensors").symlink_to("../elsewhere/spk.safetensors")
    checkpoint = open_checkpoint(root)
    left_out = {"links out of the source": ["spk.safetensors -> ../elsewhere/spk.safetensors"]}
    assert (checkpoint.side_files, dict(checkpoint.left_out)) == ((), left_out)


def test_every_reason_but_the_usual_ones_is_noted(model: Writer) -> None:
    files = MODEL | {"optimizer.pt": b"x", ".gitattributes": "x", "mxcli.json": "{}", "onnx/model.onnx": b"x"}
    notes = left_out_notes(open_checkpoint(model(files)).left_out)
    assert notes == [
        "Not carried to an output, the model in another format: onnx.",
        "Not carried to an output, training state: optimizer.pt.",
    ]


SHARDS = ("model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors")
VARIANT = {
    SHARDS[0]: {"a.weight": A},
    SHARDS[1]: {"b.weight": B},
    "model.safetensors.index.fp16.json": {
        "metadata": {"total_size": 72},
        "weight_map": {"a.weight": SHARDS[0], "b.weight": SHARDS[1]},
    },
}


def test_the_index_of_the_only_variant_is_followed(model: Writer) -> None:
    root = model(VARIANT | {"config.json": {}})
    for source in (root, root / "model.safetensors.index.fp16.json"):
        checkpoint = open_checkpoint(source)
        assert checkpoint.index == root / "model.safetensors.index.fp16.json"
        assert [path.name for path in checkpoint.files] == list(SHARDS)
        assert checkpoint.notes == ()


def test_weights_without_a_variant_come_first(model: Writer) -> None:
    checkpoint = open_checkpoint(model(VARIANT | MODEL))
    assert [path.name for path in checkpoint.files] == ["model.safetensors"]
    assert checkpoint.left_out["another copy of the weights"] == list(SHARDS)


def test_indexes_of_several_variants_are_not_guessed(model: Writer) -> None:
    other = {name.replace("fp16", "bf16"): content for name, content in VARIANT.items()}
    with pytest.raises(InputError, match=r"the weights of 2 variants; give the index of one of them as the source: "):
        open_checkpoint(model(VARIANT | other))


@pytest.mark.parametrize(
    "variant",
    [
        "diffusion_pytorch_model.fp16.safetensors",
        "diffusion_pytorch_model.non_ema.safetensors",
        "diffusion_pytorch_model-00001-of-00001.bf16.safetensors",
    ],
)
def test_a_variant_next_to_the_plain_weights_is_not_read(model: Writer, variant: str) -> None:
    files = {"diffusion_pytorch_model.safetensors": {"a.weight": A}, variant: {"a.weight": A}, "config.json": {}}
    checkpoint = open_checkpoint(model(files))
    assert [path.name for path in checkpoint.files] == ["diffusion_pytorch_model.safetensors"]
    assert checkpoint.notes == (f"{variant} is next to {checkpoint.files[0].name}, which is the model; not read.",)
    assert checkpoint.left_out == {"another copy of the weights": [variant]}


def test_variants_of_numbered_shards_are_not_read(model: Writer) -> None:
    numbered = {
        "model-00001-of-00002.safetensors": {"a.weight": A},
        "model-00002-of-00002.safetensors": {"b.weight": B},
    }
    checkpoint = open_checkpoint(model(numbered | {SHARDS[0]: {"a.weight": A}, SHARDS[1]: {"b.weight": B}}))
    assert [path.name for path in checkpoint.files] == list(numbered)
    assert checkpoint.notes == (
        f"2 files ({', '.join(SHARDS)}) are another variant of the weights; not read.",
        f"2 files ({', '.join(numbered)}) are read together; there is no index.",
    )


def test_the_weights_of_diffusers_are_the_model(model: Writer) -> None:
    files = {"diffusion_pytorch_model.safetensors": {"a.weight": A}, "extra.safetensors": {"b.weight": B}}
    checkpoint = open_checkpoint(model(files))
    assert list(checkpoint.tensors) == ["a.weight"]
    assert [path.name for path in checkpoint.side_files] == ["extra.safetensors"]


@pytest.mark.parametrize("total", [72, "72", 72.0])
def test_the_size_in_an_index_may_be_text_or_a_float(model: Writer, total: object) -> None:
    index = {
        "metadata": {"total_size": total},
        "weight_map": {"a.weight": "x.safetensors", "b.weight": "x.safetensors"},
    }
    files = {"x.safetensors": MODEL["model.safetensors"], "model.safetensors.index.json": index}
    assert open_checkpoint(model(files)).notes == ()


COMPONENTS = {
    "model_index.json": {
        "_class_name": "FluxPipeline",
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "vae": ["diffusers", "AutoencoderKL"],
    },
    "vae/diffusion_pytorch_model.safetensors": {"a.weight": A},
    "transformer/diffusion_pytorch_model.safetensors": {"a.weight": A},
    "unet/diffusion_pytorch_model.safetensors": {"a.weight": A},
    "scheduler/scheduler_config.json": "{}",
}


@pytest.mark.parametrize("more", [{}, {"flux1-dev.safetensors": {"a.weight": A}, "ae.safetensors": {"b": B}}])
def test_a_pipeline_is_refused_with_its_components(model: Writer, more: dict[str, Any]) -> None:
    root = model(COMPONENTS | more)
    with pytest.raises(InputError) as refused:
        open_checkpoint(root)
    assert refused.value.message == (
        f"{root}: a diffusers pipeline (FluxPipeline), whose components are models of their own; give one of them: "
        f"{root}/transformer (FluxTransformer2DModel), {root}/vae (AutoencoderKL), {root}/unet. "
        "Its output replaces that folder in a copy of the pipeline."
    )
    assert list(open_checkpoint(root / "transformer").tensors) == ["a.weight"]


def test_a_pipeline_without_weights_is_not_downloaded(model: Writer) -> None:
    with pytest.raises(InputError, match=r"none of its folders holds weights; finish the download\."):
        open_checkpoint(model({"model_index.json": {"vae": ["diffusers", "AutoencoderKL"]}}))
