"""Kinds of tensors and the sizes that config.json states for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mxcli.flows.verify.checks.text_model import CONVENTIONAL, EXPERTS, HIDDEN, VOCABULARY, Config, Model

Sized = Callable[[Model], int | None]


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of tensor and what its rows and columns are: `name` is searched in the name without numbers. It holds for
    these model types (none: for all)."""

    name: str
    rows: Sized | None
    columns: Sized | None
    stated: str
    types: frozenset[str] = CONVENTIONAL


def _of(*keys: str) -> Sized:
    return lambda model: model.size(*keys)


def _queries(model: Model) -> int | None:
    return None if model.heads is None else model.heads[0] * model.heads[2]


def _keys(model: Model) -> int | None:
    return None if model.heads is None else model.heads[1] * model.heads[2]


_WIDE = _of("intermediate_size", "n_inner", "ffn_dim")
_EXPERT_WIDE = _of("moe_intermediate_size", "intermediate_size")
_HIDDEN = _of(*HIDDEN)
OWN_TABLES = frozenset({"kyutai_speech_to_text"})
"""Model types whose embedding holds the words of several vocabularies."""
MORE_WORDS = {
    "mllama": 8,
    "mllama_text_model": 8,
    "musicgen": 1,
    "musicgen_melody": 1,
    "musicgen_decoder": 1,
    "moshi": 1,
}
"""Rows that embeddings of these models have beyond the vocabulary: of the image token, of padding."""


def _table_of_words(*keys: str) -> Sized:
    """Return the rows of an embedding, which some models give more than the vocabulary has."""

    def rows(model: Model) -> int | None:
        size = None if model.model_type in OWN_TABLES else model.size(*keys)
        return None if size is None else size + MORE_WORDS.get(model.model_type, 0)

    return rows


_WORDS, _TABLE = _of(*VOCABULARY), _table_of_words(*VOCABULARY)


def _heads(model: Model) -> int | None:
    heads, size = model.size("num_heads"), model.size("d_kv")
    return None if heads is None or size is None else heads * size


def _three_times(model: Model) -> int | None:
    hidden = model.size(*HIDDEN)
    return None if hidden is None else 3 * hidden


_ALL = frozenset[str]()
OPT, NEOX = frozenset({"opt"}), frozenset({"gpt_neox"})
BART = frozenset({"bart", "mbart", "marian", "m2m_100", "pegasus", "plbart", "blenderbot", "whisper"})
T5 = frozenset({"t5", "mt5", "umt5", "longt5"})
_DECODED = _table_of_words("decoder_vocab_size", *VOCABULARY)
_ENCODER, _DECODER = _of("encoder_ffn_dim"), _of("decoder_ffn_dim")
_FFN, _T5_FFN = _of("ffn_dim"), _of("d_ff")
ROWS = (
    Row(
        r"(^|(?<!decoder)\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embed_out)\.weight$",
        _TABLE,
        None,
        "vocab_size",
        _ALL,
    ),
    Row(r"^(model\.)?shared\.weight$", _WORDS, None, "vocab_size", _ALL),
    Row(r"(^|\.)decoder\.embed_tokens\.weight$", _DECODED, None, "decoder_vocab_size or vocab_size", _ALL),
    Row(r"embed_tokens\.weight$", None, _of("word_embed_proj_dim", *HIDDEN), "word_embed_proj_dim", OPT),
    Row(r"\.self_attn\.(q|k|v|out)_proj\.weight$", _HIDDEN, _HIDDEN, "hidden_size", OPT),
    Row(r"\.fc1\.weight$", _FFN, _HIDDEN, "ffn_dim, hidden_size", OPT),
    Row(r"\.fc2\.weight$", _HIDDEN, _FFN, "hidden_size, ffn_dim", OPT),
    Row(r"\.layers\..*_layer_norm\.weight$", _HIDDEN, None, "hidden_size", OPT),
    Row(r"\.attention\.query_key_value\.weight$", _three_times, _HIDDEN, "3 * hidden_size, hidden_size", NEOX),
    Row(r"\.attention\.dense\.weight$", _HIDDEN, _HIDDEN, "hidden_size", NEOX),
    Row(r"\.dense_h_to_4h\.weight$", _WIDE, _HIDDEN, "intermediate_size, hidden_size", NEOX),
    Row(r"\.dense_4h_to_h\.weight$", _HIDDEN, _WIDE, "hidden_size, intermediate_size", NEOX),
    Row(r"(embed_in|embed_out)\.weight$", None, _HIDDEN, "hidden_size", NEOX),
    Row(r"layer_?norm\.weight$", _HIDDEN, None, "hidden_size", NEOX),
    Row(r"(shared|embed_tokens)\.weight$", None, _HIDDEN, "d_model", BART | T5),
    Row(r"_attn\.(q|k|v|out)_proj\.weight$", _HIDDEN, _HIDDEN, "d_model", BART),
    Row(r"encoder\..*\.fc1\.weight$", _ENCODER, _HIDDEN, "encoder_ffn_dim, d_model", BART),
    Row(r"encoder\..*\.fc2\.weight$", _HIDDEN, _ENCODER, "d_model, encoder_ffn_dim", BART),
    Row(r"decoder\..*\.fc1\.weight$", _DECODER, _HIDDEN, "decoder_ffn_dim, d_model", BART),
    Row(r"decoder\..*\.fc2\.weight$", _HIDDEN, _DECODER, "d_model, decoder_ffn_dim", BART),
    Row(r"(layer_norm|layernorm_embedding)\.weight$", _HIDDEN, None, "d_model", BART | T5),
    Row(r"Attention\.[qkv]\.weight$", _heads, _HIDDEN, "num_heads * d_kv, d_model", T5),
    Row(r"Attention\.o\.weight$", _HIDDEN, _heads, "d_model, num_heads * d_kv", T5),
    Row(r"DenseReluDense\.wi(_\d)?\.weight$", _T5_FFN, _HIDDEN, "d_ff, d_model", T5),
    Row(r"DenseReluDense\.wo\.weight$", _HIDDEN, _T5_FFN, "d_model, d_ff", T5),
    Row(r"(^|\.)(embed_tokens|wte)\.weight$", _WORDS, _HIDDEN, "vocab_size, hidden_size"),
    Row(r"(^|\.)lm_head\.weight$", _WORDS, _HIDDEN, "vocab_size, hidden_size"),
    Row(r"(^|\.)q_proj\.weight$", _queries, _HIDDEN, "num_attention_heads * head_dim, hidden_size"),
    Row(r"(^|\.)[kv]_proj\.weight$", _keys, _HIDDEN, "num_key_value_heads * head_dim, hidden_size"),
    Row(r"(^|\.)self_attn\.o_proj\.weight$", _HIDDEN, _queries, "hidden_size, num_attention_heads * head_dim"),
    Row(r"(^|\.)mlp\.(gate|up)_proj\.weight$", _WIDE, _HIDDEN, "intermediate_size, hidden_size"),
    Row(r"(^|\.)mlp\.down_proj\.weight$", _HIDDEN, _WIDE, "hidden_size, intermediate_size"),
    Row(
        r"\.(experts|switch_mlp)\.(gate_proj|up_proj|w1|w3)\.weight$",
        _EXPERT_WIDE,
        _HIDDEN,
        "moe_intermediate_size, hidden_size",
    ),
    Row(r"\.experts\.(gate_up_proj|down_proj)$", _of(*EXPERTS), None, "num_local_experts"),
    Row(
        r"\.(experts|switch_mlp)\.(down_proj|w2)\.weight$", _HIDDEN, _EXPERT_WIDE, "hidden_size, moe_intermediate_size"
    ),
    Row(
        r"(^|\.)(input|post_attention|pre_feedforward|post_feedforward)_layernorm\.weight$",
        _HIDDEN,
        None,
        "hidden_size",
    ),
    Row(r"(^|^model\.|\.model\.)norm\.weight$", _HIDDEN, None, "hidden_size"),
    # The same in GGUF files.
    Row(r"^(token_embd|output)\.weight$", _WORDS, _HIDDEN, "vocab_size, hidden_size"),
    Row(r"^blk\.attn_q\.weight$", _queries, _HIDDEN, "num_attention_heads * head_dim, hidden_size"),
    Row(r"^blk\.attn_[kv]\.weight$", _keys, _HIDDEN, "num_key_value_heads * head_dim, hidden_size"),
    Row(r"^blk\.attn_output\.weight$", _HIDDEN, _queries, "hidden_size, num_attention_heads * head_dim"),
    Row(r"^blk\.ffn_(gate|up)\.weight$", _WIDE, _HIDDEN, "intermediate_size, hidden_size"),
    Row(r"^blk\.ffn_down\.weight$", _HIDDEN, _WIDE, "hidden_size, intermediate_size"),
    Row(r"^(blk\.(attn|ffn)|output)_norm\.weight$", _HIDDEN, None, "hidden_size"),
)
"""Every row that matches a tensor holds for it. A vector has rows only."""


@dataclass(frozen=True, slots=True)
class Family:
    """Model types with the names of the tensors in their layers: `name` is searched, and `shown` is it in words."""

    types: frozenset[str]
    name: str
    shown: str


FAMILIES = (
    Family(CONVENTIONAL, r"(^|\.)(?<!encoder\.)(?<!decoder\.)layers\.\d+\.self_attn\.", "layers.N.self_attn"),
    Family(OPT, r"(^|\.)decoder\.layers\.\d+\.self_attn\.", "decoder.layers.N.self_attn"),
    Family(BART, r"(^|\.)(en|de)coder\.layers\.\d+\.self_attn\.", "encoder.layers.N.self_attn"),
    Family(T5, r"(^|\.)block\.\d+\.layer\.\d+\.(Self|EncDec)Attention\.", "block.N.layer.0.SelfAttention"),
    Family(NEOX, r"(^|\.)layers\.\d+\.attention\.(query_key_value|dense)\.", "layers.N.attention.query_key_value"),
    Family(frozenset({"gpt2", "gpt_bigcode"}), r"(^|\.)h\.\d+\.attn\.c_(attn|proj)\.", "h.N.attn.c_attn"),
    Family(frozenset({"gptj"}), r"(^|\.)h\.\d+\.attn\.(q|k|v|out)_proj\.", "h.N.attn.q_proj"),
    Family(frozenset({"gpt_neo"}), r"(^|\.)h\.\d+\.attn\.attention\.", "h.N.attn.attention"),
    Family(frozenset({"bloom", "falcon"}), r"(^|\.)h\.\d+\.self_attention\.", "h.N.self_attention"),
    Family(frozenset({"mpt"}), r"(^|\.)blocks\.\d+\.attn\.(Wqkv|out_proj)\.", "blocks.N.attn.Wqkv"),
)
"""Families whose loaders find no tensor that is named as those of another."""
USUAL = frozenset(kind for rows in (ROWS, FAMILIES) for row in rows for kind in row.types)
"""Model types that these tables describe."""


def _has_no_last_norm(config: Config) -> bool:
    return config.get("do_layer_norm_before") is False or config.get("_remove_final_layer_norm") is True


@dataclass(frozen=True, slots=True)
class Required:
    """A tensor that models of these types have, by the end of its name, unless the configuration says otherwise."""

    types: frozenset[str]
    name: str
    what: str
    unless: Callable[[Config], bool] = lambda config: False


_LAST, _POSITIONS = "the norm after the last layer", "the table of positions"
_SIDES_WITH_NORMS = frozenset({"mbart", "m2m_100", "pegasus", "whisper"})
REQUIRED = (
    Required(OPT, "decoder.embed_positions.weight", _POSITIONS),
    Required(OPT, "decoder.final_layer_norm.weight", _LAST, _has_no_last_norm),
    Required(NEOX, "final_layer_norm.weight", _LAST),
    Required(frozenset({"gpt2", "gptj", "bloom", "falcon"}), "ln_f.weight", _LAST),
    Required(frozenset({"gpt2"}), "wpe.weight", _POSITIONS),
    Required(T5, "encoder.final_layer_norm.weight", _LAST),
    Required(T5, "decoder.final_layer_norm.weight", _LAST),
    Required(_SIDES_WITH_NORMS, "encoder.layer_norm.weight", _LAST),
    Required(_SIDES_WITH_NORMS, "decoder.layer_norm.weight", _LAST),
    Required(frozenset({"bart"}), "encoder.layernorm_embedding.weight", "the norm of the embedding"),
    Required(frozenset({"bart"}), "decoder.layernorm_embedding.weight", "the norm of the embedding"),
)
"""Tensors outside of the layers."""
