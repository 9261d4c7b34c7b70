"""Rules on what both servers have to agree about, whichever engine they run."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from dflash_cli.checkpoints.checkpoint_identity import identify
from dflash_cli.engines.serving_engine import release_text
from dflash_cli.handoff.two_servers.server import Server
from dflash_cli.handoff.two_servers.server_readers import ENGINE_SERVERS
from dflash_cli.handoff.two_servers.transfer import EngineServers, Factor, Transfer
from dflash_cli.rules.rule import Problem, check
from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.errors import CheckpointError

LEVEL = "kv-transfer"
ENGINES = tuple(ENGINE_SERVERS)
AGAIN = "dflash validate-handoff {servers} --engine {engine}"
FIX_SAME = f"start both servers with the same arguments for the draft, then check again: {AGAIN}"
FIX_COMMAND = "dflash serve-command {draft} --target {target} --engine {engine} # has the draft's arguments for both"
COMPARED_WHOLE = ("target_layer_ids", "block_size", "num_kv_heads", "head_dim", "rope")
COMPARED = (*COMPARED_WHOLE, "windows", "causal")
"""Fields of both drafts' configs; those that have an entry a layer are compared where the layers are as many."""
LOST = "the text stays right, and the draft proposes from a context that is not its own"
SAME_FILES = "the files are the same, but NIXL's handshake compares names as they are written, and refuses the pair"


@check(
    "K01",
    level="kv-transfer",
    effect="the draft's context KV of the prompt is on no server that drafts",
    fix=FIX_COMMAND,
    source="vllm-project/vllm#48221, #54926; SGLang 0.5.23 disaggregation/common/conn.py get_mha_kv_ptrs_with_pp",
    outcome="drops",
    engines=ENGINES,
)
def drafts_on_both_servers(transfer: Transfer) -> Iterator[Problem]:
    """Both servers have a draft: the one that runs prompts writes its context KV, the other one reads it.

    Over vLLM's NIXL connector a draft on one side alone is refused: by the number of KV layers, and from 0.28 on by the
    handshake before that. Its Mooncake connector and SGLang hand over the layers that the prefill server has, and say
    nothing of those that only the decode server has.
    """
    prefill, decode = (server.draft for server in transfer.servers)
    location = transfer.decode.location("draft")
    if prefill is None and decode is None:
        yield Problem(location, "neither server has a draft")
    elif prefill is None:
        problem = transfer.problem("decode-only", location, "a draft, which the prefill server has not")
        alone = "nothing notices: the text stays right, and the draft proposes without the context of the prompt"
        yield problem if problem.outcome == "stops" else replace(problem, effect=alone)
    elif decode is None:
        problem = transfer.problem("prefill-only", location, "no draft, although the prefill server has one")
        alone = "the decode server drafts nothing, and what the prefill server does for a draft is lost"
        yield problem if problem.outcome == "stops" else replace(problem, effect=alone)


@check(
    "K02",
    level="kv-transfer",
    effect="what is known here is about DFlash, whose context KV depends on the target's hidden states alone",
    fix=FIX_COMMAND,
    source="vLLM 0.33.0 config/speculative.py; SGLang 0.5.23 speculative/spec_info.py",
    outcome="drops",
    engines=ENGINES,
)
def methods_are_dflash(transfer: Transfer) -> Iterator[Problem]:
    """Both servers speculate by DFlash."""
    stated = [server.draft.method for server in transfer.servers if server.draft is not None]
    for server in transfer.servers:
        if server.draft is not None and server.draft.method not in (None, "dflash"):
            message = f"{server.draft.method!r}, expected 'dflash'"
            is_other = len(set(stated)) == 1
            problem = transfer.problem("method", server.location("method"), message)
            yield replace(problem, effect="this tool judges DFlash drafts only") if is_other else problem


@check(
    "K03",
    level="kv-transfer",
    effect=LOST,
    fix=FIX_SAME,
    source="vllm-project/vllm#49230; vLLM 0.33.0 nixl/metadata.py",
    outcome="drops",
    engines=ENGINES,
)
def drafts_are_the_same(transfer: Transfer) -> Iterator[Problem]:
    """Both servers load the same draft at the same revision.

    Drafts of one shape have KV of one shape, so that a transfer succeeds whichever of them wrote it. Directories of
    other names are compared by their files where both can be opened here; but the handshake of vLLM's NIXL connector
    compares names as they are written, the target's in every release that was read, the draft's from 0.28 on.
    """
    prefill, decode = (server.draft for server in transfer.servers)
    if prefill is None or decode is None:
        return
    names = (prefill.name, decode.name), (prefill.revision, decode.revision)
    yield from _differing(transfer, "draft", names, _digest_of_draft)


@check(
    "K04",
    level="kv-transfer",
    effect=LOST,
    fix=FIX_SAME,
    source="vLLM 0.33.0 models/qwen3_dflash.py; SGLang 0.5.23 models/dflash.py",
    outcome="drops",
    engines=ENGINES,
)
def drafts_read_alike(transfer: Transfer) -> Iterator[Problem]:
    """The configs of both copies of the draft state the same taps, block, heads, windows and causality."""
    prefill, decode = transfer.prefill.config, transfer.decode.config
    if prefill is None or decode is None or prefill == decode:
        return
    for name in COMPARED if prefill.num_layers == decode.num_layers else ("num_layers", *COMPARED_WHOLE):
        first, second = getattr(prefill, name), getattr(decode, name)
        if first != second:
            message = f"{name} {_shown(second)}, that of the prefill server {_shown(first)}"
            yield Problem(transfer.decode.location("draft"), message)


@check(
    "K05",
    level="kv-transfer",
    effect="target and draft go on from KV that another target wrote",
    fix=f"start both servers with the same target, then check again: {AGAIN}",
    source="vLLM 0.33.0 nixl/metadata.py; vllm-project/vllm#55776, open: the target's revision is not compared",
    outcome="drops",
    engines=ENGINES,
)
def targets_are_the_same(transfer: Transfer) -> Iterator[Problem]:
    """Both servers load the same target at the same revision."""
    prefill, decode = transfer.servers
    names = (prefill.target, decode.target), (prefill.target_revision, decode.target_revision)
    yield from _differing(transfer, "target", names, None)


@check(
    "K06",
    "info",
    level="kv-transfer",
    effect="the draft's context KV does not depend on it; the decode server's number is what is drafted",
    fix=f"nothing has to be done; to see the draft's own number: dflash inspect {{draft}} # then {AGAIN}",
    source="vLLM 0.33.0 nixl/metadata.py, which leaves it out of the hash",
    engines=ENGINES,
)
def numbers_of_drafted_tokens_agree(transfer: Transfer) -> Iterator[Problem]:
    """Both servers draft the same number of tokens in a step."""
    prefill, decode = (server.draft for server in transfer.servers)
    if prefill is None or decode is None or None in (prefill.num_draft_tokens, decode.num_draft_tokens):
        return
    if prefill.num_draft_tokens != decode.num_draft_tokens:
        message = f"{decode.num_draft_tokens} drafted tokens, the prefill server's {prefill.num_draft_tokens}"
        yield Problem(transfer.decode.location("num_draft_tokens"), message)


@check(
    "K07",
    level="kv-transfer",
    effect="rows of one number format are read as those of another",
    fix=f"give both servers the same --kv-cache-dtype, then check again: {AGAIN}",
    source="vLLM 0.33.0 nixl/metadata.py; SGLang 0.5.23 disaggregation/common/conn.py, on the target's alone",
    outcome="drops",
    engines=ENGINES,
)
def kv_dtypes_agree(transfer: Transfer) -> Iterator[Problem]:
    """Both servers keep KV in the same number format, the draft's too."""
    prefill, decode = transfer.servers
    if prefill.kv_dtype != decode.kv_dtype:
        message = f"{decode.kv_dtype}, that of the prefill server {prefill.kv_dtype}"
        yield transfer.problem("kv-dtype", decode.location("kv_cache_dtype"), message)
    if prefill.draft is None or decode.draft is None:
        return
    first, second = (draft.kv_dtype or server.kv_dtype for server in transfer.servers if (draft := server.draft))
    if first != second and (prefill.draft.kv_dtype or decode.draft.kv_dtype):
        message = f"the draft's KV in {second}, at the prefill server in {first}"
        yield transfer.problem("draft-kv-dtype", decode.location("draft_kv_dtype"), message)


@check(
    "K08",
    level="kv-transfer",
    effect="different releases lay out and hand over KV in different ways",
    fix=f"run one release on both servers, then check again: {AGAIN}",
    source="vllm-project/vllm#29503; vLLM 0.33.0 nixl/metadata.py",
    outcome="drops",
    engines=ENGINES,
)
def releases_agree(transfer: Transfer) -> Iterator[Problem]:
    """Both servers run the same release; NIXL's handshake in vLLM compares it."""
    first, second = transfer.prefill.launch.version, transfer.decode.launch.version
    if first is None or second is None or transfer.prefill.release == transfer.decode.release:
        return
    message = f"{second}, that of the prefill server {first}"
    problem = transfer.problem("version", transfer.decode.location("version"), message)
    yield problem if problem.outcome == "stops" else replace(problem, effect="", severity="warning")


@check(
    "K09",
    level="kv-transfer",
    effect="nothing is sent, or nobody receives it",
    fix=f"the prefill server has to send, the decode server to receive; then check again: {AGAIN}",
    source="vLLM 0.33.0 config/kv_transfer.py; SGLang 0.5.23 arg_groups/fields/disagg.py",
    engines=ENGINES,
)
def roles_fit(transfer: Transfer) -> Iterator[Problem]:
    """The prefill server sends, the decode server receives; or both do both.

    vLLM's Mooncake connector asserts that no producer receives. Its NIXL connector goes by each request, and takes the
    role for less, so that a wrong one is a warning there.
    """
    for server in transfer.servers:
        role = server.connectors[0].role if server.connectors else None
        if role in (server.role, "both"):
            continue
        found = "no role" if role is None else f"the role of a {role} server"
        problem = Problem(server.location("role"), f"{found}, expected that of a {server.role} server")
        is_free = role is not None and any(map(transfer.is_over, transfer.known.free_roles))
        yield replace(problem, severity="warning", outcome="serves") if is_free else problem


@check(
    "K10",
    level="kv-transfer",
    effect="the first request that is handed over ends the decode server",
    fix=f"use a later release on both servers, then check again: {AGAIN}",
    source="sgl-project/sglang#36140, on 0.5.16; SGLang 0.5.23 speculative/dflash_disaggregation.py",
    engines=ENGINES,
)
def release_hands_dflash_over(transfer: Transfer) -> Iterator[Problem]:
    """The release is known to hand over a DFlash draft's context.

    SGLang did not at 0.5.16 and does at 0.5.23; which release between them was the first is not known. vLLM was read
    from 0.24 on.
    """
    for server in transfer.servers:
        if server.launch.version is None:
            continue
        problem = _problem_of_release(transfer.known, server)
        if problem is not None:
            yield problem


def _problem_of_release(known: EngineServers, server: Server) -> Problem | None:
    location, version = server.location("version"), server.launch.version
    if server.release >= known.first:
        return None
    if server.release <= known.last_failing:
        return Problem(location, f"{version} has no hand-over of DFlash drafts")
    return Problem(
        location,
        f"{version}: known from {release_text(known.first)} on",
        effect="whether this release hands a DFlash draft over is not known here",
        severity="warning",
        outcome="drops",
    )


Pair = tuple[str | None, str | None]


def _differing(
    transfer: Transfer, factor: Factor, names: tuple[Pair, Pair], digest: Callable[[Server], str | None] | None
) -> Iterator[Problem]:
    """Another name or revision. `names` are (names, revisions), each of both servers."""
    (first, second), revisions = names
    if first is None or second is None:
        return
    location = transfer.decode.location(factor)
    if first != second:
        problem = transfer.problem(factor, location, f"{second}, that of the prefill server {first}")
        digests = {digest(server) for server in transfer.servers} if digest is not None else {None}
        is_same = len(digests) == 1 and None not in digests
        if problem.outcome == "stops":
            yield replace(problem, effect=SAME_FILES) if is_same else problem
        elif not is_same:
            is_sure = None not in digests or PurePath(first).name != PurePath(second).name
            yield problem if is_sure else _doubt(problem, "perhaps the same files elsewhere")
    elif revisions[0] != revisions[1]:
        is_draft = factor == "draft"
        location = transfer.decode.location("draft_revision" if is_draft else "revision")
        message = f"revision {_shown(revisions[1])}, that of the prefill server {_shown(revisions[0])}"
        problem = transfer.problem("draft" if is_draft else "target-revision", location, message)
        yield problem if None not in revisions else _doubt(problem, "the same if it is the newest")


def _doubt(problem: Problem, why: str) -> Problem:
    return replace(problem, message=f"{problem.message}; {why}", severity="warning")


def _digest_of_draft(server: Server) -> str | None:
    """The digest of the draft's files, where they are here."""
    checkpoint = server.subject.checkpoint if server.subject is not None else None
    if type(checkpoint) is not Checkpoint:
        return None
    try:
        return identify(checkpoint, str(Path(checkpoint.path))).digest
    except (CheckpointError, OSError):
        return None


def _shown(value: Any) -> str:
    return "none" if value is None else str(list(value)) if isinstance(value, tuple) else str(value)
