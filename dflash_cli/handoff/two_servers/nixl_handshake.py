"""Rules on vLLM's NIXL connector: what its handshake compares, and which shapes of KV it can hand over."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from dflash_cli.engines.serving_engine import release_text
from dflash_cli.engines.vllm import ENGINE
from dflash_cli.handoff.two_servers.both_servers import AGAIN, transfer_rule
from dflash_cli.handoff.two_servers.carriers import ENFORCE, NIXL
from dflash_cli.handoff.two_servers.server import Server, heads_of_rank
from dflash_cli.handoff.two_servers.transfer import Transfer
from dflash_cli.rules.rule import Problem

ANY_SIZE = (0, 29)
"""From this release on, layers may have KV of different sizes."""
SPLITS_DRAFT = (0, 33)
"""From this release on, the draft's heads are split separately if the target keeps compressed KV."""
MIXES_BLOCKS = (0, 27)
"""From this release on, KV in several groups can move between different block sizes."""
FIX_SIZES = f"give both servers the same --tensor-parallel-size, then check again: {AGAIN}"
FIX_BLOCKS = f"give both servers the same --block-size, then check again: {AGAIN}"

check_transfer = partial(transfer_rule, engines=ENGINE)


@check_transfer(
    "K16",
    "warning",
    effect="differences of drafts, targets and number formats are handed over undetected",
    fix=f"leave {ENFORCE} out, then check again: {AGAIN}",
    source="vllm-project/vllm#29503; vLLM 0.33.0 nixl/base_worker.py",
)
def handshake_compares(transfer: Transfer) -> Iterator[Problem]:
    """NIXL's handshake compares the arguments of both servers."""
    if transfer.is_over(NIXL) and not transfer.is_enforced:
        yield Problem(transfer.decode.location("connector"), f"{ENFORCE} is false")


@check_transfer(
    "K17",
    effect="vLLM stops at start: KV of all layers must have one size",
    fix=f"use vLLM {release_text(ANY_SIZE)} or later on both servers, then check again: {AGAIN}",
    source="vllm-project/vllm#48529; vLLM 0.24.0 to 0.28.0 nixl/base_worker.py",
)
def layers_are_of_one_size(transfer: Transfer) -> Iterator[Problem]:
    """Before 0.29, a layer of the draft has as many KV bytes per token as a layer of the target.

    With windows or states, vLLM may choose other block sizes so that pages have equal sizes. The rule warns then.
    """
    if not transfer.is_over(NIXL) or transfer.release >= ANY_SIZE:
        return
    for server in transfer.servers:
        sizes = _row_sizes(server)
        if sizes is None or sizes[0] == sizes[1] or server.is_latent:
            continue
        message = f"elements per key and rank: {sizes[0]} in the draft, {sizes[1]} in the target"
        problem = Problem(server.location("draft"), message)
        yield problem if server.is_plain else replace(problem, severity="warning", outcome="drops")


@check_transfer(
    "K18",
    effect="the handshake fails, or some ranks find no KV to take",
    fix=FIX_SIZES,
    source="vLLM 0.24.0 to 0.33.0 nixl/base_worker.py _validate_remote_agent_handshake; vllm-project/vllm#50765, open",
)
def ranks_can_be_split(transfer: Transfer) -> Iterator[Problem]:
    """Over NIXL, one server's number of ranks divides the other's, and the draft's heads split like the target's."""
    first, second = (server.tensor_parallel for server in transfer.servers)
    if not transfer.is_over(NIXL) or first == second:
        return
    problem, decode = transfer.differs("tensor_parallel", first, f"{second} ranks"), transfer.decode
    if max(first, second) % min(first, second):
        yield replace(problem, message=f"{problem.message}; neither is a multiple of the other")
    elif not decode.is_latent and not decode.has_state and _splits_alike(decode, first) is False:
        yield replace(problem, message=f"{problem.message}; the draft's KV heads split differently from the target's")
    elif not decode.is_latent:
        effect = "such a pair needs a block-contiguous KV layout, and is reported to fail in some set-ups"
        yield replace(problem, effect=effect, severity="warning", outcome="serves")


@check_transfer(
    "K19",
    effect="the draft's heads are read like the target's compressed KV, which every rank has as a whole",
    fix=FIX_SIZES,
    source="vLLM 0.33.0 nixl/base_worker.py, push_worker.py; 0.24.0 to 0.32.0 do not split",
)
def heads_are_split_beside_latent_ones(transfer: Transfer) -> Iterator[Problem]:
    """Beside a target with compressed KV (MLA), the ranks fit how the release splits the draft's heads.

    From 0.33 on, a decode server that pulls may have more ranks than the prefill server, if neither server has context
    parallelism. Earlier releases need equal numbers of ranks.
    """
    if not transfer.is_over(NIXL) or not transfer.decode.is_latent or transfer.prefill.draft is None:
        return
    first, second = (server.tensor_parallel for server in transfer.servers)
    assert transfer.links is not None
    is_split = transfer.release >= SPLITS_DRAFT
    if first != second and (not is_split or transfer.links[1].carrier.pushes or second < first):
        yield transfer.differs("tensor_parallel", first, f"{second} ranks beside an MLA target")
    elif is_split and max(server.context_parallel for server in transfer.servers) > 1:
        location = transfer.decode.location("tensor_parallel")
        yield Problem(location, "decode context parallelism beside an MLA target with a draft that is not MLA")


@check_transfer(
    "K20",
    effect="the handshake fails",
    fix=FIX_BLOCKS,
    source="vLLM 0.24.0 to 0.33.0 kv_connector/utils.py block_size_ratio, nixl/base_worker.py",
)
def blocks_fit_into_blocks(transfer: Transfer) -> Iterator[Problem]:
    """Over NIXL, the decode server's block size is a multiple of the prefill server's, and in some cases equal to it.

    It must be equal if KV is buffered on the host, if the decode server has fewer ranks, and before 0.27 with windows
    or states.
    """
    first, second = (server.page_size for server in transfer.servers)
    if not transfer.is_over(NIXL) or first is None or second is None or first == second:
        return
    why = _reason_for_equal_blocks(transfer) if second % first == 0 else "not a multiple"
    if why is not None:
        yield transfer.differs("page_size", f"{first}; {why}", second)


def _reason_for_equal_blocks(transfer: Transfer) -> str | None:
    prefill, decode = transfer.servers
    assert transfer.links is not None
    if any(item.is_on_host for item in transfer.links):
        return "expected equal sizes, since KV is buffered on the host"
    if prefill.tensor_parallel > decode.tensor_parallel:
        return "expected equal sizes, since the prefill server has more ranks"
    is_grouped = decode.target_facts is not None and decode.config is not None and not decode.is_plain
    if transfer.release < MIXES_BLOCKS and is_grouped and not decode.is_latent:
        return f"expected equal sizes before vLLM {release_text(MIXES_BLOCKS)}, since layers are of several kinds"
    return None


def _row_sizes(server: Server) -> tuple[int, int] | None:
    """Elements of a key on one rank, of the draft and of the target; None if either is unknown."""
    config, facts = server.config, server.target_facts
    if config is None or facts is None or facts.num_kv_heads is None or facts.head_dim is None:
        return None
    ranks = server.tensor_parallel
    own = heads_of_rank(config.num_kv_heads, ranks) * config.head_dim
    return own, heads_of_rank(facts.num_kv_heads, ranks) * facts.head_dim


def _splits_alike(decode: Server, prefill_ranks: int) -> bool | None:
    """Whether both servers' ranks have draft heads in the same proportion to target heads, as vLLM assumes.

    None if the heads are unknown.
    """
    config, facts = decode.config, decode.target_facts
    if config is None or facts is None or facts.num_kv_heads is None:
        return None
    ranks = prefill_ranks, decode.tensor_parallel
    there, here = (heads_of_rank(config.num_kv_heads, number) for number in ranks)
    target_there, target_here = (heads_of_rank(facts.num_kv_heads, number) for number in ranks)
    if prefill_ranks > facts.num_kv_heads:
        return prefill_ranks < decode.tensor_parallel and there == here
    return there * target_here == here * target_there
