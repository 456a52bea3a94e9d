from __future__ import annotations

import pytest

from mxcli.files.model_counts import excessive_count

LLAMA = {"hidden_size": 4096, "vocab_size": 128256, "num_hidden_layers": 32, "num_attention_heads": 32}


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        (LLAMA, 291),
        (LLAMA, 3),
        ({"num_hidden_layers": 1000}, 9000),
        ({"n_layer": 96, "n_head": 96, "n_embd": 12288}, 1200),
        ({"text_config": {"num_hidden_layers": 61, "n_routed_experts": 256}, "num_labels": 2}, 90_000),
        ({"num_local_experts": 128, "num_hidden_layers": 36, "initial_context_length": 4096}, 400),
        ({"num_hidden_layers": "many", "num_attention_heads": None, "max_position_embeddings": 10**30}, 9),
    ],
)
def test_models_as_there_are(config: dict[str, object], tensors: int) -> None:
    assert excessive_count(config, tensors) is None


@pytest.mark.parametrize(
    ("change", "tensors", "shown"),
    [
        ({"num_hidden_layers": 10**300}, 291, "num_hidden_layers more than 2^64"),
        ({"num_hidden_layers": 2**31}, 291, "num_hidden_layers 2,147,483,648"),
        ({"num_hidden_layers": 292}, 291, "num_hidden_layers 292"),
        ({"n_layer": 5000}, 9000, "n_layer 5,000"),
        ({"encoder_layers": 257}, 12, "encoder_layers 257"),
        ({"text_config": {"num_experts": 100_000}}, 291, "num_experts 100,000"),
        ({"num_labels": 10**9}, 291, "num_labels 1,000,000,000"),
        ({"num_attention_heads": 8192}, 291, "num_attention_heads 8,192"),
    ],
)
def test_numbers_of_no_model(change: dict[str, object], tensors: int, shown: str) -> None:
    assert excessive_count({**LLAMA, **change}, tensors) == shown
