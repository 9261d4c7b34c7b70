"""Pairs of servers with a fault that a rule finds, and pairs on which the rule is silent."""

from dataclasses import replace
from typing import Any

from dflash_testing import checkpoints as support
from dflash_testing.server_pairs import MOONCAKE, MORIIO, NIXL, SPECULATIVE, TRANSFER, TransferCase, all_of, over, put

WIDE = replace(support.SMALL, kv_heads=4)
WINDOWS = replace(support.SMALL, windows=(None, 8))
LATENT = {"model_type": "deepseek_v3", "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
STATES = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}


NO_DRAFT = put(SPECULATIVE, support.REMOVED)
NO_SGLANG_DRAFT = all_of(
    put("speculative_algorithm", support.REMOVED), put("speculative_draft_model_path", support.REMOVED)
)
OTHER = put(f"{SPECULATIVE}.model", "FOLDER/dflash-other")
COPY = put(f"{SPECULATIVE}.model", "FOLDER/copies/dflash-draft")
UNCHECKED = put(f"{TRANSFER}.kv_connector_extra_config", {"enforce_handshake_compat": False})
WARN: Any = {"severity": "warning", "outcome": "unknown"}
MINOR: Any = {"severity": "warning", "outcome": "arrives"}

CASES = [
    TransferCase(rule="K01", at="decode.json:speculative_config.model", prefill=NO_DRAFT),
    TransferCase(
        rule="K01", at="decode.json:speculative_config.model", prefill=NO_DRAFT, sound=over(MOONCAKE), outcome="lost"
    ),
    TransferCase(rule="K01", at="decode.json:speculative_config.model", decode=NO_DRAFT, sound=over(MOONCAKE)),
    TransferCase(rule="K01", at="decode.json:speculative_config.model", both=NO_DRAFT, outcome="lost"),
    TransferCase(
        rule="K01",
        at="decode.json:speculative_draft_model_path",
        engine="sglang",
        prefill=NO_SGLANG_DRAFT,
        outcome="lost",
    ),
    TransferCase(rule="K02", at="decode.json:speculative_config.method", decode=put(f"{SPECULATIVE}.method", "eagle3")),
    TransferCase(
        rule="K02",
        at="prefill.json:speculative_algorithm",
        engine="sglang",
        both=put("speculative_algorithm", "DSPARK"),
        outcome="lost",
    ),
    TransferCase(rule="K03", at="decode.json:speculative_config.model", decode=OTHER),
    TransferCase(
        rule="K03",
        at="decode.json:speculative_config.model",
        engine="vllm@0.29",
        both=UNCHECKED,
        decode=OTHER,
        outcome="lost",
    ),
    TransferCase(rule="K03", at="decode.json:speculative_config.model", decode=COPY),
    TransferCase(
        rule="K03",
        at="decode.json:speculative_config.model",
        sound=over(MOONCAKE),
        outcome="lost",
        decode=put(f"{SPECULATIVE}.model", "FOLDER/nowhere/org/other"),
    ),
    TransferCase(
        rule="K03",
        at="decode.json:speculative_config.model",
        sound=over(MOONCAKE),
        decode=put(f"{SPECULATIVE}.model", "FOLDER/nowhere/dflash-draft"),
        **WARN,
    ),
    TransferCase(
        rule="K03",
        at="decode.json:speculative_config.revision",
        values=("a", "b"),
        prefill=put(f"{SPECULATIVE}.revision", "a"),
        decode=put(f"{SPECULATIVE}.revision", "b"),
    ),
    TransferCase(
        rule="K03",
        at="decode.json:speculative_draft_model_revision",
        engine="sglang",
        prefill=put("speculative_draft_model_revision", "a"),
        **WARN,
    ),
    TransferCase(
        rule="K04",
        at="decode.json:speculative_config.model",
        values=("target_layer_ids", "[1, 2]", "[0, 2]"),
        engine="vllm@0.27",
        decode=OTHER,
        outcome="lost",
    ),
    TransferCase(
        rule="K04",
        at="decode.json:speculative_config.model",
        values=("num_layers", "2", "3"),
        sound=over(MOONCAKE),
        outcome="lost",
        prefill=put(f"{SPECULATIVE}.model", "tiny"),
    ),
    TransferCase(rule="K05", at="decode.json:model", decode=put("model", "FOLDER/nowhere")),
    TransferCase(
        rule="K05", at="decode.json:revision", prefill=put("revision", "a"), decode=put("revision", "b"), outcome="lost"
    ),
    TransferCase(
        rule="K06",
        at="decode.json:speculative_config.num_speculative_tokens",
        values=("2", "3"),
        severity="info",
        outcome="arrives",
        decode=put(f"{SPECULATIVE}.num_speculative_tokens", 2),
    ),
    TransferCase(
        rule="K07", at="decode.json:kv_cache_dtype", values=("fp8", "auto"), decode=put("kv_cache_dtype", "fp8")
    ),
    TransferCase(
        rule="K07",
        at="decode.json:kv_cache_dtype",
        sound=over(MOONCAKE),
        decode=put("kv_cache_dtype", "fp8"),
        outcome="lost",
    ),
    TransferCase(
        rule="K07",
        at="decode.json:speculative_config.kv_cache_dtype",
        values=("fp8", "auto"),
        decode=put(f"{SPECULATIVE}.kv_cache_dtype", "fp8"),
    ),
    TransferCase(
        rule="K07",
        at="decode.json:speculative_draft_kv_cache_dtype",
        engine="sglang",
        outcome="lost",
        decode=put("speculative_draft_kv_cache_dtype", "fp8_e4m3"),
    ),
    TransferCase(
        rule="K08",
        at="decode.json:version",
        values=("0.33.0", "0.32.0"),
        prefill=put("version", "0.32.0"),
        decode=put("version", "0.33.0"),
    ),
    TransferCase(
        rule="K08",
        at="decode.json:version",
        sound=over(MOONCAKE),
        prefill=put("version", "v0.32.1"),
        decode=put("version", "0.33"),
        **WARN,
    ),
    TransferCase(rule="K09", at="decode.json:kv_transfer_config.kv_role", decode=put(TRANSFER, support.REMOVED)),
    TransferCase(
        rule="K09",
        at="prefill.json:kv_transfer_config.kv_role",
        sound=over(MOONCAKE),
        prefill=put(f"{TRANSFER}.kv_role", "kv_consumer"),
    ),
    TransferCase(
        rule="K09",
        at="decode.json:kv_transfer_config.kv_role",
        decode=put(f"{TRANSFER}.kv_role", "kv_producer"),
        **MINOR,
    ),
    TransferCase(
        rule="K09", at="decode.json:disaggregation_mode", engine="sglang", decode=put("disaggregation_mode", "null")
    ),
    TransferCase(rule="K10", at="prefill.json:version", engine="sglang", both=put("version", "0.5.16")),
    TransferCase(rule="K10", at="prefill.json:version", engine="sglang", both=put("version", "0.5.20"), **WARN),
    TransferCase(rule="K10", at="prefill.json:version", both=put("version", "0.23.0"), **WARN),
    TransferCase(rule="K11", at="decode.json:kv_transfer_config.kv_connector", decode=over(MOONCAKE)),
    TransferCase(rule="K11", at="prefill.json:kv_transfer_config.kv_connector", both=over("P2pConnector")),
    TransferCase(rule="K11", at="decode.json:kv_transfer_config.kv_connector", decode=over("NixlPushConnector")),
    TransferCase(rule="K12", at="prefill.json:kv_transfer_config.kv_connector", both=over("OffloadingConnector")),
    TransferCase(
        rule="K12", at="prefill.json:kv_transfer_config.kv_connector", both=over("LMCacheConnectorV1"), **WARN
    ),
    TransferCase(
        rule="K12",
        at="prefill.json:kv_transfer_config.kv_connector",
        **WARN,
        both=all_of(over("Own"), put(f"{TRANSFER}.kv_connector_module_path", "own")),
    ),
    TransferCase(rule="K13", at="prefill.json:kv_transfer_config.kv_connector", engine="vllm@0.31", both=over(MORIIO)),
    TransferCase(
        rule="K13",
        at="prefill.json:kv_transfer_config.kv_connector",
        engine="vllm@0.30",
        **WARN,
        both=over(MORIIO, read_mode=True),
    ),
    TransferCase(
        rule="K14",
        at="decode.json:kv_transfer_config.kv_connector",
        shape=WINDOWS,
        sound=over(MORIIO, read_mode="true"),
        both=over(MORIIO),
    ),
    TransferCase(rule="K14", at="decode.json:model", sound=over(MORIIO), target=STATES),
    TransferCase(
        rule="K14",
        at="decode.json:model",
        engine="vllm@0.30",
        sound=over(MORIIO, read_mode=True),
        target=STATES,
        **WARN,
    ),
    TransferCase(
        rule="K15",
        at="decode.json:disable_hybrid_kv_cache_manager",
        decode=over(
            "MultiConnector",
            connectors=[
                {"kv_connector": NIXL, "kv_role": "kv_both"},
                {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
            ],
        ),
    ),
    TransferCase(
        rule="K15",
        at="decode.json:disable_hybrid_kv_cache_manager",
        decode=put("disable_hybrid_kv_cache_manager", True),
    ),
    TransferCase(rule="K16", at="decode.json:kv_transfer_config.kv_connector", both=UNCHECKED, **MINOR),
    TransferCase(
        rule="K17",
        at="prefill.json:speculative_config.model",
        values=("32", "16"),
        engine="vllm@0.28",
        shape=WIDE,
        sound_shape=support.SMALL,
    ),
    TransferCase(
        rule="K17",
        at="prefill.json:speculative_config.model",
        engine="vllm@0.28",
        **WARN,
        shape=replace(WIDE, windows=(None, 8)),
        sound_shape=support.SMALL,
    ),
    TransferCase(
        rule="K18",
        at="decode.json:tensor_parallel_size",
        values=("3", "2"),
        prefill=put("tensor_parallel_size", 2),
        decode=put("tensor_parallel_size", 3),
    ),
    TransferCase(
        rule="K18",
        at="decode.json:tensor_parallel_size",
        shape=WIDE,
        prefill=put("tensor_parallel_size", 2),
        decode=put("tensor_parallel_size", 4),
    ),
    TransferCase(rule="K18", at="decode.json:tensor_parallel_size", decode=put("tensor_parallel_size", 2), **MINOR),
    TransferCase(
        rule="K19",
        at="decode.json:tensor_parallel_size",
        engine="vllm@0.32",
        target=LATENT,
        decode=put("tensor_parallel_size", 2),
    ),
    TransferCase(
        rule="K19", at="decode.json:tensor_parallel_size", target=LATENT, prefill=put("tensor_parallel_size", 2)
    ),
    TransferCase(
        rule="K19", at="decode.json:tensor_parallel_size", target=LATENT, both=put("decode_context_parallel_size", 2)
    ),
    TransferCase(
        rule="K20",
        at="decode.json:block_size",
        values=("16", "32"),
        prefill=put("block_size", 32),
        decode=put("block_size", 16),
    ),
    TransferCase(
        rule="K20",
        at="decode.json:block_size",
        both=put(f"{TRANSFER}.kv_buffer_device", "cpu"),
        prefill=put("block_size", 16),
        decode=put("block_size", 32),
    ),
    TransferCase(
        rule="K20",
        at="decode.json:block_size",
        engine="vllm@0.26",
        shape=WINDOWS,
        prefill=put("block_size", 16),
        decode=put("block_size", 32),
    ),
    TransferCase(
        rule="K21",
        at="prefill.json:disaggregation_transfer_backend",
        engine="sglang",
        both=put("disaggregation_transfer_backend", "fake"),
    ),
    TransferCase(
        rule="K21",
        at="prefill.json:disaggregation_transfer_backend",
        engine="sglang",
        both=put("disaggregation_transfer_backend", "rdma"),
    ),
    TransferCase(
        rule="K21",
        at="decode.json:disaggregation_transfer_backend",
        engine="sglang",
        decode=put("disaggregation_transfer_backend", "nixl"),
    ),
    TransferCase(
        rule="K21",
        at="prefill.json:disaggregation_transfer_backend",
        engine="sglang",
        **WARN,
        both=put("disaggregation_transfer_backend", "ascend"),
    ),
    TransferCase(
        rule="K22", at="decode.json:page_size", values=("32", "16"), engine="sglang", decode=put("page_size", 32)
    ),
    TransferCase(
        rule="K22", at="decode.json:page_size", engine="sglang", **MINOR, decode=put("page_size", support.REMOVED)
    ),
    TransferCase(rule="K23", at="prefill.json:pp_size", engine="sglang", prefill=put("pp_size", 2)),
    TransferCase(
        rule="K23",
        at="decode.json:disaggregation_decode_enable_radix_cache",
        engine="sglang",
        decode=put("disaggregation_decode_enable_radix_cache", True),
    ),
    TransferCase(
        rule="K24", at="decode.json:tp_size", engine="sglang", prefill=all_of(put("attn_cp_size", 2), put("tp_size", 4))
    ),
    TransferCase(rule="K24", at="decode.json:tp_size", engine="sglang", shape=WIDE, decode=put("tp_size", 2), **WARN),
]


TWO_RANKS = put("tensor_parallel_size", 2)
SILENT = [
    TransferCase(rule="K03", engine="vllm@0.27", decode=COPY),
    TransferCase(rule="K03", engine="vllm@0.28", decode=COPY, sound=over(MOONCAKE)),
    TransferCase(rule="K03", engine="sglang", decode=put("speculative_draft_model_path", "FOLDER/copies/dflash-draft")),
    TransferCase(rule="K08", prefill=put("version", "0.33.0"), decode=put("version", "v0.33")),
    TransferCase(rule="K10", engine="sglang", both=put("version", "0.5.23.post1")),
    TransferCase(rule="K10", both=put("version", "0.24.0+cu130")),
    TransferCase(rule="K11", prefill=over("NixlPullConnector")),
    TransferCase(rule="K13", engine="vllm@0.32", both=over(MORIIO)),
    TransferCase(rule="K13", engine="vllm@0.31", both=over(MORIIO, read_mode=True)),
    TransferCase(rule="K14", engine="vllm@0.29", shape=WINDOWS, both=over(MORIIO)),
    TransferCase(rule="K15", engine="vllm@0.33", both=put("disable_hybrid_kv_cache_manager", True)),
    TransferCase(rule="K17", engine="vllm@0.29", shape=WIDE),
    TransferCase(rule="K17", engine="vllm@0.28", shape=WIDE, target=LATENT),
    TransferCase(rule="K18", both=TWO_RANKS),
    TransferCase(rule="K19", engine="vllm@0.33", target=LATENT, decode=TWO_RANKS),
    TransferCase(rule="K19", engine="vllm@0.32", target=LATENT, both=TWO_RANKS),
    TransferCase(
        rule="K20", engine="vllm@0.27", shape=WINDOWS, prefill=put("block_size", 16), decode=put("block_size", 32)
    ),
    TransferCase(rule="K21", engine="sglang", decode=put("disaggregation_transfer_backend", "mooncake_tcp")),
    TransferCase(rule="K24", engine="sglang", decode=put("tp_size", 2)),
]
"""Pairs just on the other side of a rule."""
