"""A model is given back as it was, and what cannot be emulated is refused in one sentence."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_transformers import tiny, tokens
from torch import nn

import mxcli
from mxcli.errors import EnvironmentFailure, MxcliError, RefusedError, UsageError


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


def test_the_model_is_given_back() -> None:
    model = tiny("mixtral")
    plain, before = model(tokens()).logits, {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    emulation = mxcli.emulate(model, format="mxfp4")
    assert not torch.equal(model(tokens()).logits, plain)
    assert list(model.state_dict()) == list(before)
    assert isinstance(model.model.layers[0].self_attn.q_proj, nn.Linear)
    assert repr(model) == repr(tiny("mixtral"))
    emulation.remove()
    emulation.remove()
    assert [type(module) for module in model.modules()] == classes
    assert all(
        vars(module).keys() == vars(other).keys()
        for module, other in zip(model.modules(), tiny("mixtral").modules(), strict=True)
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(tokens()).logits, plain)


def test_an_error_in_the_block_gives_the_model_back() -> None:
    model = small()
    with pytest.raises(KeyError), mxcli.emulate(model, format="mxfp8"):
        raise KeyError
    assert type(model[0]) is nn.Linear


def test_copies_and_pickles_are_of_the_plain_model() -> None:
    model, x = small(), torch.randn(4, 64)
    plain = model(x)
    with mxcli.emulate(model, format="mxfp4"):
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        emulated = model(x)
    for other in (copied, pickled, saved):
        assert type(other[0]) is nn.Linear
        assert torch.equal(other(x), plain)
    assert not torch.equal(emulated, plain)


def test_weights_are_quantized_again_when_they_change() -> None:
    model, x = small(), torch.randn(4, 64)

    def expected() -> torch.Tensor:
        with mxcli.emulate(model, format="nvfp4"):
            return model(x)

    with mxcli.emulate(model, format="nvfp4") as emulation:
        changes: list[Callable[[], Any]] = [
            lambda: nn.init.normal_(model[0].weight),
            lambda: model.load_state_dict(small().state_dict()),
            lambda: setattr(model[2], "weight", nn.Parameter(torch.randn(32, 64))),
            lambda: (model[0].weight.data.mul_(2), emulation.refresh()),  # which torch does not count
        ]
        found = [model(x)]
        for change in changes:
            change()
            found.append(model(x))
            emulation.remove()
            assert torch.equal(found[-1], expected())
            assert not torch.equal(found[-1], found[-2])
            emulation = mxcli.emulate(model, format="nvfp4")
        emulation.remove()


def test_a_change_of_one_layer_changes_the_scale_of_its_fused_set() -> None:
    """q, k and v share a tensor scale, which comes from the largest of them."""
    model = tiny("llama")
    attention = model.model.layers[0].self_attn
    x = torch.eye(64)
    with mxcli.emulate(model, format="nvfp4", activations="none"), torch.no_grad():
        before = attention.q_proj(x)
        attention.k_proj.weight.mul_(7.3)
        after = attention.q_proj(x)
        scaled: Any = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        joined: Any = mxcli.quantize(scaled, "nvfp4").dequantize()
    assert not torch.equal(before, after)
    assert torch.equal(after, joined[:64].T)


def test_a_frozen_model_needs_no_gradients() -> None:
    model = small().requires_grad_(False)
    x = torch.randn(4, 64, requires_grad=True)
    with mxcli.emulate(model, format="mxfp8"):
        model(x).sum().backward()
    assert x.grad is not None
    with mxcli.emulate(model, format="mxfp8"), torch.inference_mode():
        assert model(x).shape == (4, 32)


@pytest.mark.parametrize("options", [{"format": "mxfp8"}, {"training": "mxfp8"}])
def test_inference_mode_and_training_take_turns(options: dict[str, Any]) -> None:
    model, x = small(), torch.randn(4, 64)
    with mxcli.emulate(model, **options):
        with torch.inference_mode():
            inside, own = model(x), model(torch.randn(4, 64))
        outside = model(x)
        outside.sum().backward()
    assert torch.equal(inside, outside)
    assert own.is_inference()


def test_inputs_that_several_layers_read_are_followed() -> None:
    """q, k and v read one tensor, which is quantized once; changes in place, and another tensor, are seen."""
    layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(3)])
    x = torch.randn(4, 64)
    with mxcli.emulate(layers, format="mxfp8", activations="fp8_e4m3"), torch.no_grad():
        first = [layer(x) for layer in layers]
        x.mul_(3)
        second = [layer(x) for layer in layers]
        other = [layer(torch.full((4, 64), 0.3)) for layer in layers]
    with mxcli.emulate(layers, format="mxfp8", activations="fp8_e4m3"), torch.no_grad():
        assert all(torch.equal(layer(x.clone()), y) for layer, y in zip(layers, second, strict=True))
        assert all(torch.equal(layer(torch.full((4, 64), 0.3)), y) for layer, y in zip(layers, other, strict=True))
    assert not torch.allclose(first[0], second[0])


def test_a_module_under_several_names() -> None:
    """One module that a model calls twice, and one parameter in two modules."""
    layer, other = nn.Linear(64, 64), nn.Linear(64, 64)
    other.weight = layer.weight
    model = nn.Sequential(layer, nn.ReLU(), layer, other)
    x = torch.randn(4, 64)
    with mxcli.emulate(model, format="mxfp4", activations="none") as emulation:
        found = model(x)
    values: Any = mxcli.quantize(layer.weight, "mxfp4").dequantize()
    first = x @ values.T + layer.bias
    assert torch.allclose(found, (first.relu() @ values.T + layer.bias) @ values.T + other.bias, atol=1e-5)
    assert list(emulation.layers) == ["0", "3"]
    assert all(type(module) is nn.Linear for module in (layer, other))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("options", [{"format": "nvfp4"}, {"training": "mxfp8"}])
def test_gradient_checkpointing(options: dict[str, Any], reentrant: bool) -> None:
    """Layers that are computed again in the backward pass give the same gradients."""
    found = []
    for recomputed in (False, True):
        model = tiny("llama").train()
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with mxcli.emulate(model, **options):
            model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        found.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert torch.equal(*found)


def test_models_are_saved_as_they_are(tmp_path: Path) -> None:
    model = tiny("mixtral")
    with mxcli.emulate(model, format="nvfp4", kv_cache="mxfp8"):
        copied = copy.deepcopy(model)
        model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    loaded.set_experts_implementation("eager")
    for other in (copied, loaded):
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
        assert torch.equal(other(tokens()).logits, model(tokens()).logits)


def test_second_derivatives_in_training_are_refused() -> None:
    model, x = small(), torch.randn(4, 64, requires_grad=True)
    with mxcli.emulate(model, training="mxfp8"):
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


def test_empty_batches() -> None:
    model = small()
    with mxcli.emulate(model, format="nvfp4"):
        assert model(torch.randn(0, 64)).shape == (0, 32)
        assert model(torch.randn(2, 0, 64)).shape == (2, 0, 32)


def test_compiled_models_run_uncompiled() -> None:
    model, x = small(), torch.randn(4, 64)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with mxcli.emulate(compiled, format="mxfp4") as emulation:
        inside = compiled(x)
    with mxcli.emulate(model, format="mxfp4"):
        assert torch.equal(model(x), inside)
    assert emulation.notes == ("compiled code (torch.compile) runs uncompiled meanwhile",)
    assert torch.equal(compiled(x), model(x))


def _meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 64))


def _odd_forward() -> nn.Module:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    return nn.Sequential(Doubled(64, 64))


def _patched() -> nn.Module:
    model = small()
    model[0].forward = lambda x: x  # type: ignore[method-assign,assignment]
    return model


def _nan() -> nn.Module:
    model = small()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    return model


@pytest.mark.parametrize(
    ("model", "options", "kind", "sentence"),
    [
        (small, {}, UsageError, "no format: name one (format='mxfp8'), a recipe or a training recipe."),
        (lambda: 3, {"format": "mxfp8"}, UsageError, "a int is not a torch.nn.Module: give the model to emulate."),
        (small, {"format": "mxfp9"}, UsageError, "unknown format 'mxfp9'"),
        (small, {"format": "mxfp8", "activations": "fp3"}, UsageError, "unknown format 'fp3'"),
        (small, {"format": "mxfp8", "activations": 8}, UsageError, "activations 8: give 'same', 'none' or the name"),
        (small, {"format": "mxfp8", "include": [3]}, UsageError, "include has 3: give selectors as text."),
        (small, {"format": "mxfp8", "exclude": "7.weight"}, UsageError, "--exclude 7.weight: matches no tensor."),
        (small, {"recipe": 3}, UsageError, "recipe 3 is neither the path of a file nor a recipe that was read."),
        (small, {"training": "mxfp9"}, UsageError, "unknown training recipe 'mxfp9'"),
        (small, {"training": "mxfp8,nvfp4"}, UsageError, "training 'mxfp8,nvfp4': name one training recipe."),
        (
            small,
            {"training": "mxfp8", "format": "mxfp4"},
            UsageError,
            "training='mxfp8' says how every operand is quantized: leave format out.",
        ),
        (nn.ReLU, {"format": "mxfp8"}, RefusedError, "ReLU: "),
        (lambda: nn.Sequential(nn.LayerNorm(64)), {"format": "mxfp8"}, RefusedError, "Sequential: nothing to quantize"),
        (_meta, {"format": "mxfp8"}, RefusedError, "Sequential: 0.weight is on the device meta, without values"),
        (_odd_forward, {"format": "mxfp8"}, RefusedError, "0.weight: how a Doubled computes with it is not known"),
        (_patched, {"format": "mxfp8"}, RefusedError, "0.weight: its forward was replaced by another program"),
        (
            lambda: nn.Sequential(nn.Linear(65, 64)),
            {"format": "mxfp8"},
            RefusedError,
            "0.weight [64, 65]: last dimension 65 is not a multiple of 32 (mxfp8_e4m3).",
        ),
        (
            lambda: nn.TransformerEncoderLayer(64, 4, 64),
            {"format": "mxfp8", "exclude": "self_attn*"},
            RefusedError,
            "linear1.weight: torch's TransformerEncoderLayer does not call it as a module",
        ),
        (
            lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.Linear(64, 64)),
            {"format": "mxfp8"},
            RefusedError,
            "0: its weight is computed by a parametrization, which is not emulated: remove it",
        ),
        (
            lambda: tiny("llama"),
            {"training": "mxfp8", "include": ["@embedding", "@weight"]},
            RefusedError,
            "model.embed_tokens.weight: a table of embeddings has no products: leave it out of include.",
        ),
        (small, {"format": "mxfp8", "device": "cudo"}, UsageError, "unknown device 'cudo'"),
        (lambda: nn.LSTM(64, 64), {"format": "mxfp8"}, RefusedError, "how a LSTM computes with it is not known"),
    ],
)
def test_refusals(model: Callable[[], Any], options: dict[str, Any], kind: type[MxcliError], sentence: str) -> None:
    made = model()
    with pytest.raises(kind) as raised:
        mxcli.emulate(made, **options)
    assert sentence in str(raised.value)
    assert not isinstance(made, nn.Module) or not any(hasattr(type(m), "_mxcli_emulated") for m in made.modules())


def test_twice() -> None:
    model = small()
    sentence = r"Sequential: is emulated already \(0\): call remove\(\) of that emulation first\."
    with mxcli.emulate(model, format="mxfp8"), pytest.raises(RefusedError, match=sentence):
        mxcli.emulate(model, format="mxfp4")
    with mxcli.emulate(model, format="mxfp4"):
        pass


def test_nan_weights_are_refused_at_their_first_use() -> None:
    x = torch.randn(4, 64)
    with mxcli.emulate(model := _nan(), format="mxfp8"), pytest.raises(RefusedError) as raised:
        model(x)
    assert str(raised.value).startswith("0.weight: holds 1 NaN or infinite values: exclude it, or state")
    with mxcli.emulate(model, format="mxfp8", nonfinite="nan-block"):
        assert model(x).isnan().any()


def test_inputs_are_refused_on_request_only() -> None:
    model, x = small(), torch.randn(4, 64)
    x[2, 7] = float("nan")
    with mxcli.emulate(model, format="mxfp8", nonfinite="error"), pytest.raises(RefusedError) as raised:
        model(x)
    assert str(raised.value).startswith("0: its inputs hold 1 NaN or infinite values: exclude the layer, or state")
    with mxcli.emulate(model, format="mxfp8"):
        assert model(x).isnan().all(1).tolist() == [False, False, True, False]


def test_a_layer_of_a_recipe_that_the_model_lacks(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('format = "mxfp8"\n[[override]]\nselect = "2.wight"\nkeep = true\n')
    with pytest.raises(UsageError, match=r"2\.wight.*matches no tensor"):
        mxcli.emulate(small(), recipe=path)


def test_a_quantized_model() -> None:
    model = small()
    model[0].weight = nn.Parameter(model[0].weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(RefusedError, match="its weights are quantized already"):
        mxcli.emulate(model, format="mxfp8")


def test_formats_of_gate_and_up_differ(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('format = "mxfp8"\n[[override]]\nselect = "*.w1"\nformat = "mxfp4"\n')
    with pytest.raises(RefusedError) as raised:
        mxcli.emulate(tiny("mixtral"), recipe=path)
    assert "model.layers.0.mlp.experts.gate_up_proj: its matrices have one input" in str(raised.value)
    with mxcli.emulate(tiny("mixtral"), recipe=path, activations="none") as emulation:
        what = emulation.layers["model.layers.0.mlp.experts.gate_up_proj"]
    assert what == "weights mxfp4_e2m1 and mxfp8_e4m3, inputs as they are"


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        EnvironmentFailure, match=r"emulating a format needs torch, which .*pip install 'mxcli\[torch\]'"
    ):
        mxcli.emulate(None, format="mxfp8")  # type: ignore[arg-type]
