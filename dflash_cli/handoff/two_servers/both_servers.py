"""Rules on the arguments that both servers must agree on, for every engine."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from dflash_cli.checkpoints.checkpoint_identity import identify
from dflash_cli.engines.serving_engine import release_text
from dflash_cli.handoff.two_servers.server import Server
from dflash_cli.handoff.two_servers.server_readers import ENGINE_SERVERS
from dflash_cli.handoff.two_servers.transfer import EngineServers, Factor, Transfer
from dflash_cli.rules.rule import Problem, check
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.errors import DFlashError

AGAIN = "dflash validate-handoff {servers} --engine {engine}"
FIX_SAME = f"start both servers with the same arguments for the draft, then check again: {AGAIN}"
FIX_COMMAND = "dflash serve-command {draft} --target {target} --engine {engine} # prints the draft's arguments for both"
COMPARED_WHOLE = ("target_layer_ids", "block_size", "num_kv_heads", "head_dim", "rope")
COMPARED = (*COMPARED_WHOLE, "windows", "causal")
"""Config fields of both drafts to compare. The last two have one entry per layer: they need equal layer counts."""
WRONG_CONTEXT = "the text stays right, but the draft reads the wrong context"
SAME_FILES = "the files are equal, but NIXL's handshake compares the names as given, and refuses the pair"

transfer_rule = partial(check, level="kv-transfer")
check_transfer = partial(transfer_rule, engines=tuple(ENGINE_SERVERS))


@check_transfer(
    "K01",
    effect="the server that drafts lacks the draft's context KV of the prompt",
    fix=FIX_COMMAND,
    source="vllm-project/vllm#48221, #54926; SGLang 0.5.23 disaggregation/common/conn.py get_mha_kv_ptrs_with_pp",
    outcome="drops",
)
def drafts_on_both_servers(transfer: Transfer) -> Iterator[Problem]:
    """Both servers have a draft: the prefill server writes its context KV, and the decode server reads it.

    vLLM's NIXL connector refuses a draft on one server only: from 0.28 on by the handshake, earlier by the number of KV
    layers. vLLM's Mooncake connector and SGLang hand over the prefill server's layers. They do not report layers that
    only the decode server has.
    """
    prefill, decode = (server.draft for server in transfer.servers)
    location = transfer.decode.location("draft")
    if prefill is None and decode is None:
        yield Problem(location, "neither server has a draft")
    elif prefill is None:
        effect = "nothing detects it: the text stays right, but the draft lacks the context of the prompt"
        yield _unless_noticed(transfer.problem("decode-only", location, "a draft; prefill server: no draft"), effect)
    elif decode is None:
        effect = "the decode server does not draft, so the prefill server computes the draft's context in vain"
        yield _unless_noticed(transfer.problem("prefill-only", location, "no draft; prefill server: a draft"), effect)


@check_transfer(
    "K02",
    effect="this tool knows DFlash only: its context KV depends on the target's hidden states alone",
    fix=FIX_COMMAND,
    source="vLLM 0.33.0 config/speculative.py; SGLang 0.5.23 speculative/spec_info.py",
    outcome="drops",
)
def methods_are_dflash(transfer: Transfer) -> Iterator[Problem]:
    """Both servers speculate with DFlash."""
    stated = [server.draft.method for server in transfer.servers if server.draft is not None]
    for server in transfer.servers:
        if server.draft is not None and server.draft.method not in (None, "dflash"):
            message = f"{server.draft.method!r}, expected 'dflash'"
            problem = transfer.problem("method", server.location("method"), message)
            is_other = len(set(stated)) == 1
            yield replace(problem, effect="this tool judges DFlash drafts only") if is_other else problem


@check_transfer(
    "K03",
    effect=WRONG_CONTEXT,
    fix=FIX_SAME,
    source="vllm-project/vllm#49230; vLLM 0.33.0 nixl/metadata.py",
    outcome="drops",
)
def drafts_are_the_same(transfer: Transfer) -> Iterator[Problem]:
    """Both servers load the same draft at the same revision.

    Drafts of equal shape have KV of equal shape, so a transfer succeeds with either draft's KV. Directories with other
    names are compared by their files if both can be opened here. The handshake of vLLM's NIXL connector compares names
    as given: the target's in every release that was read, the draft's from 0.28 on.
    """
    prefill, decode = (server.draft for server in transfer.servers)
    if prefill is None or decode is None or prefill.name is None or decode.name is None:
        return
    if prefill.name == decode.name:
        yield from _other_revision(transfer, "draft", "draft_revision", prefill.revision, decode.revision)
        return
    problem = transfer.differs("draft", prefill.name, decode.name, factor="draft")
    digests = {_digest_of_draft(server) for server in transfer.servers}
    is_same = len(digests) == 1 and None not in digests
    if problem.outcome == "stops":
        yield replace(problem, effect=SAME_FILES) if is_same else problem
    elif not is_same:
        is_sure = None not in digests or PurePath(prefill.name).name != PurePath(decode.name).name
        yield problem if is_sure else _doubt(problem, "maybe the same files in another place")


@check_transfer(
    "K04",
    effect=WRONG_CONTEXT,
    fix=FIX_SAME,
    source="vLLM 0.33.0 models/qwen3_dflash.py; SGLang 0.5.23 models/dflash.py",
    outcome="drops",
)
def drafts_read_alike(transfer: Transfer) -> Iterator[Problem]:
    """The configs of both copies of the draft state the same taps, block, heads, windows and causality."""
    prefill, decode = transfer.prefill.config, transfer.decode.config
    if prefill is None or decode is None or prefill == decode:
        return
    for name in COMPARED if prefill.num_layers == decode.num_layers else ("num_layers", *COMPARED_WHOLE):
        first, second = getattr(prefill, name), getattr(decode, name)
        if first != second:
            yield transfer.differs("draft", _shown(first), f"{name} {_shown(second)}")


@check_transfer(
    "K05",
    effect="target and draft continue from KV that another target wrote",
    fix=f"start both servers with the same target, then check again: {AGAIN}",
    source="vLLM 0.33.0 nixl/metadata.py; vllm-project/vllm#55776, open: the target's revision is not compared",
    outcome="drops",
)
def targets_are_the_same(transfer: Transfer) -> Iterator[Problem]:
    """Both servers load the same target at the same revision."""
    prefill, decode = transfer.servers
    if prefill.target is None or decode.target is None:
        return
    if prefill.target == decode.target:
        revisions = prefill.target_revision, decode.target_revision
        yield from _other_revision(transfer, "target-revision", "target_revision", *revisions)
        return
    problem = transfer.differs("target", prefill.target, decode.target, factor="target")
    is_sure = problem.outcome == "stops" or PurePath(prefill.target).name != PurePath(decode.target).name
    yield problem if is_sure else _doubt(problem, "maybe the same files in another place")


@check_transfer(
    "K06",
    "info",
    effect="the draft's context KV does not depend on this number; the decode server's number applies",
    fix=f"nothing has to be done; to see the draft's own number: dflash inspect {{draft}} # then {AGAIN}",
    source="vLLM 0.33.0 nixl/metadata.py: the hash does not contain it",
)
def numbers_of_drafted_tokens_agree(transfer: Transfer) -> Iterator[Problem]:
    """Both servers draft the same number of tokens per step."""
    first, second = (server.draft.num_draft_tokens if server.draft is not None else None for server in transfer.servers)
    if None not in (first, second) and first != second:
        yield transfer.differs("num_draft_tokens", first, f"{second} draft tokens")


@check_transfer(
    "K07",
    effect="a server reads rows of one number format as another format",
    fix=f"give both servers the same --kv-cache-dtype, then check again: {AGAIN}",
    source="vLLM 0.33.0 nixl/metadata.py; SGLang 0.5.23 disaggregation/common/conn.py, for the target only",
    outcome="drops",
)
def kv_dtypes_agree(transfer: Transfer) -> Iterator[Problem]:
    """Both servers keep KV in the same number format, for the target and for the draft."""
    prefill, decode = transfer.servers
    if prefill.kv_dtype != decode.kv_dtype:
        yield transfer.differs("kv_dtype", prefill.kv_dtype, decode.kv_dtype, factor="kv-dtype")
    if prefill.draft is None or decode.draft is None:
        return
    first, second = prefill.draft.kv_dtype or prefill.kv_dtype, decode.draft.kv_dtype or decode.kv_dtype
    if first != second and (prefill.draft.kv_dtype or decode.draft.kv_dtype):
        yield transfer.differs("draft_kv_dtype", first, f"the draft's KV in {second}", factor="draft-kv-dtype")


@check_transfer(
    "K08",
    effect="releases differ in how they lay out and hand over KV",
    fix=f"run one release on both servers, then check again: {AGAIN}",
    source="vllm-project/vllm#29503; vLLM 0.33.0 nixl/metadata.py",
    outcome="drops",
)
def releases_agree(transfer: Transfer) -> Iterator[Problem]:
    """Both servers run the same release. vLLM's NIXL handshake compares it."""
    first, second = transfer.prefill.launch.version, transfer.decode.launch.version
    if first is None or second is None or transfer.prefill.release == transfer.decode.release:
        return
    problem = transfer.differs("version", first, second, factor="version")
    yield problem if problem.outcome == "stops" else replace(problem, effect="", severity="warning")


@check_transfer(
    "K09",
    effect="no server sends, or no server receives",
    fix=f"let the prefill server send and the decode server receive, then check again: {AGAIN}",
    source="vLLM 0.33.0 config/kv_transfer.py; SGLang 0.5.23 arg_groups/fields/disagg.py",
)
def roles_fit(transfer: Transfer) -> Iterator[Problem]:
    """The prefill server sends and the decode server receives, or both do both.

    vLLM's Mooncake connector asserts that no producer receives. Its NIXL connector follows each request instead of the
    role, so a wrong role is a warning there.
    """
    for server in transfer.servers:
        role = server.connectors[0].role if server.connectors else None
        if role in (server.role, "both"):
            continue
        found = "no role" if role is None else f"role {role}"
        problem = Problem(server.location("role"), f"{found}, expected {server.role} or both")
        is_free = role is not None and any(map(transfer.is_over, transfer.known.free_roles))
        yield replace(problem, severity="warning", outcome="serves") if is_free else problem


@check_transfer(
    "K10",
    effect="the decode server crashes at the first request that is handed over",
    fix=f"use a later release on both servers, then check again: {AGAIN}",
    source="sgl-project/sglang#36140, on 0.5.16; SGLang 0.5.23 speculative/dflash_disaggregation.py",
)
def release_hands_dflash_over(transfer: Transfer) -> Iterator[Problem]:
    """The release is known to hand over a DFlash draft's context.

    SGLang 0.5.16 does not, and 0.5.23 does. The first release in between that does is unknown. vLLM was read from 0.24
    on.
    """
    for server in transfer.servers:
        if server.launch.version is not None and server.release < transfer.known.first:
            yield _problem_of_release(transfer.known, server)


def _problem_of_release(known: EngineServers, server: Server) -> Problem:
    location, version = server.location("version"), server.launch.version
    if server.release <= known.last_failing:
        return Problem(location, f"{version} does not hand over DFlash drafts")
    return Problem(
        location,
        f"{version}; known to hand over DFlash drafts: {release_text(known.first)} and later",
        effect="this release may lose the draft's context",
        severity="warning",
        outcome="drops",
    )


def _unless_noticed(problem: Problem, effect: str) -> Problem:
    """The problem with this effect, unless the servers detect it."""
    return problem if problem.outcome == "stops" else replace(problem, effect=effect)


def _other_revision(
    transfer: Transfer, factor: Factor, key: str, first: str | None, second: str | None
) -> Iterator[Problem]:
    if first == second:
        return
    problem = transfer.differs(key, _shown(first), f"revision {_shown(second)}", factor=factor)
    yield problem if None not in (first, second) else _doubt(problem, "equal if that revision is the newest")


def _doubt(problem: Problem, why: str) -> Problem:
    return replace(problem, message=f"{problem.message}; {why}", severity="warning")


def _digest_of_draft(server: Server) -> str | None:
    """The digest of the draft's files, or None if they are not on this machine."""
    checkpoint = server.subject.checkpoint if server.subject is not None else None
    if type(checkpoint) is not Checkpoint:
        return None
    try:
        return identify(checkpoint, str(Path(checkpoint.path))).digest
    except (DFlashError, OSError):
        return None


def _shown(value: Any) -> str:
    return "none" if value is None else str(list(value)) if isinstance(value, tuple) else str(value)
