"""Pairs of servers with a fault that a rule finds, and a function that writes them."""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_testing import checkpoints as support

Json = dict[str, Any]
Change = Callable[[Json], None]

NIXL, MOONCAKE, MORIIO = "NixlConnector", "MooncakeConnector", "MoRIIOConnector"
SPECULATIVE, TRANSFER = "speculative_config", "kv_transfer_config"
WIDE = replace(support.SMALL, kv_heads=4)
WINDOWS = replace(support.SMALL, windows=(None, 8))
LATENT = {"model_type": "deepseek_v3", "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
STATES = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}


@dataclass(frozen=True, kw_only=True)
class TransferCase:
    """A sound pair of servers with a fault: `prefill`, `decode` and `both` change the servers' files.

    The rule finds nothing in the sound pair. `shape` is the draft's shape, `sound_shape` its shape in the sound pair if
    it differs. `target` changes the target's config. `outcome` is the outcome of the verdict.
    """

    rule: str
    message: str
    engine: str = "vllm"
    severity: str = "error"
    outcome: str = "refused"
    prefill: Change | None = None
    decode: Change | None = None
    both: Change | None = None
    shape: support.Shape = support.SMALL
    target: Mapping[str, Any] = field(default_factory=dict)
    sound_shape: support.Shape | None = None
    sound: Change | None = None
    """A change of both servers' files, also in the sound pair."""

    @property
    def name(self) -> str:
        return f"{self.rule}-{self.engine}-{self.message[:20]}"


def put(path: str, value: Any) -> Change:
    """Set a key, `a.b` within a; REMOVED takes it out."""

    def change(arguments: Json) -> None:
        *outer, last = path.split(".")
        for key in outer:
            arguments = arguments.setdefault(key, {})
        arguments.pop(last, None)
        if value is not support.REMOVED:
            arguments[last] = value

    return change


def all_of(*changes: Change) -> Change:
    def change(arguments: Json) -> None:
        for item in changes:
            item(arguments)

    return change


def over(name: str, **options: Any) -> Change:
    """Use a connector of vLLM."""
    return all_of(put(f"{TRANSFER}.kv_connector", name), put(f"{TRANSFER}.kv_connector_extra_config", options))


def arguments(engine: str, role: str, draft: Path, target: Path) -> Json:
    """A sound server of an engine, at the release that the engine's newest is."""
    if engine.partition("@")[0] == "sglang":
        return {
            "model_path": str(target),
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": str(draft),
            "speculative_num_draft_tokens": 4,
            "disaggregation_mode": role,
            "page_size": 16,
        }
    return {
        "model": str(target),
        SPECULATIVE: {"method": "dflash", "model": str(draft), "num_speculative_tokens": 3},
        TRANSFER: {"kv_connector": NIXL, "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role]},
    }


def make_models(folder: Path, shape: support.Shape, target: Mapping[str, Any]) -> Path:
    """A draft, a copy of it, another one of its shape, and their target; made once for a shape and a target's keys."""
    models = folder / f"{hash(shape)}-{hash(json.dumps(target))}"
    if not models.exists():
        support.make_native(models / "dflash-draft", shape)
        support.make_native(models / "copies" / "dflash-draft", shape)
        support.make_native(models / "dflash-other", replace(shape, taps=(1, 2)))
        support.make_target(models / "target", support.SMALL, **target)
    return models


def write_pair(case: TransferCase, folder: Path, models: Path, *, is_sound: bool = False) -> tuple[Path, Path]:
    """Write the two files of a case or of its sound pair. FOLDER in the files becomes the folder of the models."""
    shape = case.sound_shape if is_sound and case.sound_shape is not None else case.shape
    made = make_models(models, shape, {} if is_sound else case.target)
    files = []
    for role, own in (("prefill", case.prefill), ("decode", case.decode)):
        server = deepcopy(arguments(case.engine, role, made / "dflash-draft", made / "target"))
        changes = (case.sound,) if is_sound else (case.sound, case.both, own)
        for change in changes:
            if change is not None:
                change(server)
        files.append(folder / f"{role}.json")
        files[-1].write_text(json.dumps(server).replace("FOLDER", str(made)))
    return files[0], files[1]


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
    TransferCase(rule="K01", message="which the prefill server has not", prefill=NO_DRAFT),
    TransferCase(
        rule="K01", message="which the prefill server has not", prefill=NO_DRAFT, sound=over(MOONCAKE), outcome="lost"
    ),
    TransferCase(rule="K01", message="although the prefill server has one", decode=NO_DRAFT, sound=over(MOONCAKE)),
    TransferCase(rule="K01", message="neither server has a draft", both=NO_DRAFT, outcome="lost"),
    TransferCase(
        rule="K01", message="which the prefill server has not", engine="sglang", prefill=NO_SGLANG_DRAFT, outcome="lost"
    ),
    TransferCase(rule="K02", message="'eagle3', expected 'dflash'", decode=put(f"{SPECULATIVE}.method", "eagle3")),
    TransferCase(
        rule="K02", message="'dspark'", engine="sglang", both=put("speculative_algorithm", "DSPARK"), outcome="lost"
    ),
    TransferCase(rule="K03", message="dflash-other, that of", decode=OTHER),
    TransferCase(rule="K03", message="dflash-other, that of", engine="vllm@0.29", both=UNCHECKED, decode=OTHER,
                 outcome="lost"),
    TransferCase(rule="K03", message="copies/dflash-draft, that of", decode=COPY),
    TransferCase(rule="K03", message="org/other, that of", sound=over(MOONCAKE), outcome="lost",
                 decode=put(f"{SPECULATIVE}.model", "FOLDER/nowhere/org/other")),
    TransferCase(rule="K03", message="perhaps the same files", sound=over(MOONCAKE),
                 decode=put(f"{SPECULATIVE}.model", "FOLDER/nowhere/dflash-draft"), **WARN),
    TransferCase(rule="K03", message="revision b, that of the prefill server a",
                 prefill=put(f"{SPECULATIVE}.revision", "a"), decode=put(f"{SPECULATIVE}.revision", "b")),
    TransferCase(rule="K03", message="the same if it is the newest", engine="sglang",
                 prefill=put("speculative_draft_model_revision", "a"), **WARN),
    TransferCase(rule="K04", message="target_layer_ids [1, 2], that of the prefill server [0, 2]", engine="vllm@0.27",
                 decode=OTHER, outcome="lost"),
    TransferCase(rule="K04", message="num_layers 2, that of the prefill server 3", sound=over(MOONCAKE), outcome="lost",
                 prefill=put(f"{SPECULATIVE}.model", "tiny")),
    TransferCase(rule="K05", message="nowhere, that of", decode=put("model", "FOLDER/nowhere")),
    TransferCase(rule="K05", message="revision b", prefill=put("revision", "a"), decode=put("revision", "b"),
                 outcome="lost"),
    TransferCase(rule="K06", message="2 drafted tokens, the prefill server's 3", severity="info", outcome="arrives",
                 decode=put(f"{SPECULATIVE}.num_speculative_tokens", 2)),
    TransferCase(rule="K07", message="fp8, that of the prefill server auto", decode=put("kv_cache_dtype", "fp8")),
    TransferCase(rule="K07", message="fp8, that of", sound=over(MOONCAKE), decode=put("kv_cache_dtype", "fp8"),
                 outcome="lost"),
    TransferCase(rule="K07", message="the draft's KV in fp8, at the prefill server in auto",
                 decode=put(f"{SPECULATIVE}.kv_cache_dtype", "fp8")),
    TransferCase(rule="K07", message="the draft's KV in fp8_e4m3", engine="sglang", outcome="lost",
                 decode=put("speculative_draft_kv_cache_dtype", "fp8_e4m3")),
    TransferCase(rule="K08", message="0.33.0, that of the prefill server 0.32.0",
                 prefill=put("version", "0.32.0"), decode=put("version", "0.33.0")),
    TransferCase(rule="K08", message="0.33, that of", sound=over(MOONCAKE),
                 prefill=put("version", "v0.32.1"), decode=put("version", "0.33"), **WARN),
    TransferCase(rule="K09", message="no role, expected that of a decode server",
                 decode=put(TRANSFER, support.REMOVED)),
    TransferCase(rule="K09", message="the role of a decode server, expected that of a prefill server",
                 sound=over(MOONCAKE), prefill=put(f"{TRANSFER}.kv_role", "kv_consumer")),
    TransferCase(rule="K09", message="the role of a prefill server", decode=put(f"{TRANSFER}.kv_role", "kv_producer"),
                 **MINOR),
    TransferCase(rule="K09", message="no role", engine="sglang", decode=put("disaggregation_mode", "null")),
    TransferCase(rule="K10", message="0.5.16 has no hand-over", engine="sglang", both=put("version", "0.5.16")),
    TransferCase(rule="K10", message="0.5.20: known from 0.5.23 on", engine="sglang", both=put("version", "0.5.20"),
                 **WARN),
    TransferCase(rule="K10", message="0.23.0: known from 0.24 on", both=put("version", "0.23.0"), **WARN),
    TransferCase(rule="K11", message="MooncakeConnector, that of the prefill server NixlConnector",
                 decode=over(MOONCAKE)),
    TransferCase(rule="K11", message="'P2pConnector' is no connector", both=over("P2pConnector")),
    TransferCase(rule="K11", message="NixlPushConnector, that of", decode=over("NixlPushConnector")),
    TransferCase(rule="K12", message="OffloadingConnector: keeps KV in memory", both=over("OffloadingConnector")),
    TransferCase(rule="K12", message="LMCacheConnectorV1: it counts", both=over("LMCacheConnectorV1"), **WARN),
    TransferCase(rule="K12", message="Own: its code is not the engine's", **WARN,
                 both=all_of(over("Own"), put(f"{TRANSFER}.kv_connector_module_path", "own"))),
    TransferCase(rule="K13", message="MoRIIO writes, and vllm 0.31 clips no blocks", engine="vllm@0.31",
                 both=over(MORIIO)),
    TransferCase(rule="K13", message="MoRIIO reads, by vllm 0.30", engine="vllm@0.30", **WARN,
                 both=over(MORIIO, read_mode=True)),
    TransferCase(rule="K14", message="the draft has windows", shape=WINDOWS, sound=over(MORIIO, read_mode="true"),
                 both=over(MORIIO)),
    TransferCase(rule="K14", message="layers with a state", sound=over(MORIIO), target=STATES),
    TransferCase(rule="K14", message="layers with a state", engine="vllm@0.30", sound=over(MORIIO, read_mode=True),
                 target=STATES, **WARN),
    TransferCase(rule="K15", message="is off, at the prefill server on",
                 decode=over("MultiConnector", connectors=[{"kv_connector": NIXL, "kv_role": "kv_both"},
                                                           {"kv_connector": "LMCacheConnectorV1",
                                                            "kv_role": "kv_both"}])),
    TransferCase(rule="K15", message="is off, at the prefill server on",
                 decode=put("disable_hybrid_kv_cache_manager", True)),
    TransferCase(rule="K16", message="enforce_handshake_compat is false", both=UNCHECKED, **MINOR),
    TransferCase(rule="K17", message="32 numbers a key of the draft on each rank, 16 of the target",
                 engine="vllm@0.28", shape=WIDE, sound_shape=support.SMALL),
    TransferCase(rule="K17", message="numbers a key of the draft", engine="vllm@0.28", **WARN,
                 shape=replace(WIDE, windows=(None, 8)), sound_shape=support.SMALL),
    TransferCase(rule="K18", message="3 ranks, the prefill server's 2: one is no multiple",
                 prefill=put("tensor_parallel_size", 2), decode=put("tensor_parallel_size", 3)),
    TransferCase(rule="K18", message="KV heads split in another way", shape=WIDE,
                 prefill=put("tensor_parallel_size", 2), decode=put("tensor_parallel_size", 4)),
    TransferCase(rule="K18", message="2 ranks, the prefill server's 1", decode=put("tensor_parallel_size", 2), **MINOR),
    TransferCase(rule="K19", message="2 ranks, the prefill server's 1, beside an MLA", engine="vllm@0.32",
                 target=LATENT, decode=put("tensor_parallel_size", 2)),
    TransferCase(rule="K19", message="1 ranks, the prefill server's 2, beside an MLA", target=LATENT,
                 prefill=put("tensor_parallel_size", 2)),
    TransferCase(rule="K19", message="decode context parallelism", target=LATENT,
                 both=put("decode_context_parallel_size", 2)),
    TransferCase(rule="K20", message="16, the prefill server's 32: not a multiple",
                 prefill=put("block_size", 32), decode=put("block_size", 16)),
    TransferCase(rule="K20", message="buffered on the host", both=put(f"{TRANSFER}.kv_buffer_device", "cpu"),
                 prefill=put("block_size", 16), decode=put("block_size", 32)),
    TransferCase(rule="K20", message="before vLLM 0.27", engine="vllm@0.26", shape=WINDOWS,
                 prefill=put("block_size", 16), decode=put("block_size", 32)),
    TransferCase(rule="K21", message="fake: sends nothing", engine="sglang",
                 both=put("disaggregation_transfer_backend", "fake")),
    TransferCase(rule="K21", message="'rdma', expected one of", engine="sglang",
                 both=put("disaggregation_transfer_backend", "rdma")),
    TransferCase(rule="K21", message="nixl, that of the prefill server mooncake", engine="sglang",
                 decode=put("disaggregation_transfer_backend", "nixl")),
    TransferCase(rule="K21", message="ascend: nobody", engine="sglang", **WARN,
                 both=put("disaggregation_transfer_backend", "ascend")),
    TransferCase(rule="K22", message="32, that of the prefill server 16", engine="sglang", decode=put("page_size", 32)),
    TransferCase(rule="K22", message="stated for one server only", engine="sglang", **MINOR,
                 decode=put("page_size", support.REMOVED)),
    TransferCase(rule="K23", message="2, expected 1 with DFlash", engine="sglang", prefill=put("pp_size", 2)),
    TransferCase(rule="K23", message="expected off with DFlash", engine="sglang",
                 decode=put("disaggregation_decode_enable_radix_cache", True)),
    TransferCase(rule="K24", message="which shares them with context parallelism", engine="sglang",
                 prefill=all_of(put("attn_cp_size", 2), put("tp_size", 4))),
    TransferCase(rule="K24", message="2 ranks, the prefill server's 1", engine="sglang", shape=WIDE,
                 decode=put("tp_size", 2), **WARN),
]  # fmt: skip


TWO_RANKS = put("tensor_parallel_size", 2)
SILENT = [
    TransferCase(rule="K03", message="", engine="vllm@0.27", decode=COPY),
    TransferCase(rule="K03", message="", engine="vllm@0.28", decode=COPY, sound=over(MOONCAKE)),
    TransferCase(rule="K03", message="", engine="sglang", decode=put("speculative_draft_model_path",
                                                                   "FOLDER/copies/dflash-draft")),
    TransferCase(rule="K08", message="", prefill=put("version", "0.33.0"), decode=put("version", "v0.33")),
    TransferCase(rule="K10", message="", engine="sglang", both=put("version", "0.5.23.post1")),
    TransferCase(rule="K10", message="", both=put("version", "0.24.0+cu130")),
    TransferCase(rule="K11", message="", prefill=over("NixlPullConnector")),
    TransferCase(rule="K13", message="", engine="vllm@0.32", both=over(MORIIO)),
    TransferCase(rule="K13", message="", engine="vllm@0.31", both=over(MORIIO, read_mode=True)),
    TransferCase(rule="K14", message="", engine="vllm@0.29", shape=WINDOWS, both=over(MORIIO)),
    TransferCase(rule="K15", message="", engine="vllm@0.33", both=put("disable_hybrid_kv_cache_manager", True)),
    TransferCase(rule="K17", message="", engine="vllm@0.29", shape=WIDE),
    TransferCase(rule="K17", message="", engine="vllm@0.28", shape=WIDE, target=LATENT),
    TransferCase(rule="K18", message="", both=TWO_RANKS),
    TransferCase(rule="K19", message="", engine="vllm@0.33", target=LATENT, decode=TWO_RANKS),
    TransferCase(rule="K19", message="", engine="vllm@0.32", target=LATENT, both=TWO_RANKS),
    TransferCase(rule="K20", message="", engine="vllm@0.27", shape=WINDOWS, prefill=put("block_size", 16),
                 decode=put("block_size", 32)),
    TransferCase(rule="K21", message="", engine="sglang", decode=put("disaggregation_transfer_backend",
                                                                   "mooncake_tcp")),
    TransferCase(rule="K24", message="", engine="sglang", decode=put("tp_size", 2)),
]  # fmt: skip
"""Pairs just on the other side of a rule."""
