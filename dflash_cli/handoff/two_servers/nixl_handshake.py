"""Rules on vLLM's NIXL connector: what its handshake compares, and the shapes that it can hand over."""

from collections.abc import Iterator
from dataclasses import replace

from dflash_cli.engines.serving_engine import release_text
from dflash_cli.engines.vllm import ENGINE
from dflash_cli.handoff.two_servers.both_servers import AGAIN
from dflash_cli.handoff.two_servers.carriers import ENFORCE, NIXL, nixl_mode
from dflash_cli.handoff.two_servers.server import Server, heads_of_rank
from dflash_cli.handoff.two_servers.transfer import Transfer
from dflash_cli.rules.rule import Problem, check

ANY_SIZE = (0, 29)
"""The first release whose layers may have KV of different sizes."""
SPLITS_DRAFT = (0, 33)
"""The first release that splits a draft's heads by themselves, where the target keeps compressed KV."""
MIXES_BLOCKS = (0, 27)
"""The first release that hands over between block sizes where KV is in several groups."""
FIX_SIZES = f"give both servers the same --tensor-parallel-size, then check again: {AGAIN}"
FIX_BLOCKS = f"give both servers the same --block-size, then check again: {AGAIN}"


@check(
    "K16",
    "warning",
    level="kv-transfer",
    effect="drafts, targets and number formats that differ are handed over without a word",
    fix=f"leave {ENFORCE} out, then check again: {AGAIN}",
    source="vllm-project/vllm#29503; vLLM 0.33.0 nixl/base_worker.py",
    engines=ENGINE,
)
def handshake_compares(transfer: Transfer) -> Iterator[Problem]:
    """NIXL's handshake compares what both servers are started with."""
    if transfer.is_over(NIXL) and not transfer.is_enforced:
        yield Problem(transfer.decode.location("connector"), f"{ENFORCE} is false")


@check(
    "K17",
    level="kv-transfer",
    effect="vLLM stops as it starts: all layers' KV must have one size",
    fix=f"use vLLM {release_text(ANY_SIZE)} or later on both servers, then check again: {AGAIN}",
    source="vllm-project/vllm#48529; vLLM 0.24.0 to 0.28.0 nixl/base_worker.py",
    engines=ENGINE,
)
def layers_are_of_one_size(transfer: Transfer) -> Iterator[Problem]:
    """Before 0.29, the draft's KV of a token takes as many bytes a layer as the target's.

    With windows or states among the layers vLLM may make their pages alike by other block sizes, so that it is a
    warning then.
    """
    if not transfer.is_over(NIXL) or transfer.release >= ANY_SIZE:
        return
    for server in transfer.servers:
        sizes = _row_sizes(server)
        if sizes is None or sizes[0] == sizes[1] or server.is_latent:
            continue
        message = f"{sizes[0]} numbers a key of the draft on each rank, {sizes[1]} of the target"
        problem = Problem(server.location("draft"), message)
        yield problem if server.is_plain else replace(problem, severity="warning", outcome="drops")


@check(
    "K18",
    level="kv-transfer",
    effect="the handshake fails, or ranks have no KV to take",
    fix=FIX_SIZES,
    source="vLLM 0.24.0 to 0.33.0 nixl/base_worker.py _validate_remote_agent_handshake; vllm-project/vllm#50765, open",
    engines=ENGINE,
)
def ranks_can_be_split(transfer: Transfer) -> Iterator[Problem]:
    """Over NIXL the ranks of one server divide those of the other, and split the draft's heads as the target's."""
    first, second = (server.tensor_parallel for server in transfer.servers)
    if not transfer.is_over(NIXL) or first == second:
        return
    location = transfer.decode.location("tensor_parallel")
    said = f"{second} ranks, the prefill server's {first}"
    if max(first, second) % min(first, second):
        yield Problem(location, f"{said}: one is no multiple of the other")
        return
    split = None if transfer.decode.is_latent or transfer.decode.has_state else _splits_alike(transfer.decode, first)
    if split is False:
        yield Problem(location, f"{said}: the draft's KV heads split in another way than the target's")
    elif not transfer.decode.is_latent:
        effect = "such a pair needs a block-contiguous KV layout, and is reported to fail in some set-ups"
        yield Problem(location, said, effect, severity="warning", outcome="serves")


@check(
    "K19",
    level="kv-transfer",
    effect="the draft's heads are taken for the target's compressed KV, which every rank has whole",
    fix=FIX_SIZES,
    source="vLLM 0.33.0 nixl/base_worker.py, push_worker.py; 0.24.0 to 0.32.0 split nothing",
    engines=ENGINE,
)
def heads_are_split_beside_latent_ones(transfer: Transfer) -> Iterator[Problem]:
    """Beside a target with compressed KV (MLA), ranks agree with what the release splits of the draft.

    From 0.33 on the decode server may have more ranks than the prefill server if it pulls, and none of both has context
    parallelism. Before, both have the same number.
    """
    if not transfer.is_over(NIXL) or not transfer.decode.is_latent or transfer.prefill.draft is None:
        return
    first, second = (server.tensor_parallel for server in transfer.servers)
    assert transfer.carriers is not None
    pulls = nixl_mode(transfer.carriers[1][0]) == "pull"
    is_context_split = max(server.context_parallel for server in transfer.servers) > 1
    location = transfer.decode.location("tensor_parallel")
    if first != second and (transfer.release < SPLITS_DRAFT or not pulls or second < first):
        yield Problem(location, f"{second} ranks, the prefill server's {first}, beside an MLA target")
    elif is_context_split and transfer.release >= SPLITS_DRAFT:
        yield Problem(location, "decode context parallelism, beside an MLA target with a draft that is not MLA")


@check(
    "K20",
    level="kv-transfer",
    effect="the handshake fails",
    fix=FIX_BLOCKS,
    source="vLLM 0.24.0 to 0.33.0 kv_connector/utils.py block_size_ratio, nixl/base_worker.py",
    engines=ENGINE,
)
def blocks_fit_into_blocks(transfer: Transfer) -> Iterator[Problem]:
    """Over NIXL the decode server's block size is a multiple of the prefill server's, and equal where it must be.

    It must be with KV that is buffered on the host, with fewer ranks at the decode server, and before 0.27 with windows
    or states.
    """
    prefill, decode = transfer.servers
    first, second = prefill.page_size, decode.page_size
    if not transfer.is_over(NIXL) or first is None or second is None or first == second:
        return
    message = f"{second}, the prefill server's {first}"
    why = _reason_for_equal_blocks(transfer) if second % first == 0 else "not a multiple"
    if why is not None:
        yield Problem(decode.location("page_size"), f"{message}: {why}")


def _reason_for_equal_blocks(transfer: Transfer) -> str | None:
    prefill, decode = transfer.servers
    assert transfer.carriers is not None
    if any(item.is_on_host for item, _ in transfer.carriers):
        return "expected the same, since KV is buffered on the host"
    if prefill.tensor_parallel > decode.tensor_parallel:
        return "expected the same, since the prefill server has more ranks"
    is_grouped = decode.target_facts is not None and decode.config is not None and not decode.is_plain
    if transfer.release < MIXES_BLOCKS and is_grouped and not decode.is_latent:
        return "expected the same before vLLM 0.27, since layers are of several kinds"
    return None


def _row_sizes(server: Server) -> tuple[int, int] | None:
    """Numbers of a key on one rank, of the draft and of the target; None where either is not known."""
    config, facts = server.config, server.target_facts
    if config is None or facts is None or facts.num_kv_heads is None or facts.head_dim is None:
        return None
    ranks = server.tensor_parallel
    own = heads_of_rank(config.num_kv_heads, ranks) * config.head_dim
    return own, heads_of_rank(facts.num_kv_heads, ranks) * facts.head_dim


def _splits_alike(decode: Server, prefill_ranks: int) -> bool | None:
    """Whether ranks of both servers have the draft's KV heads in the proportion of the target's, as vLLM takes for
    granted; None where the heads are not known.
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
