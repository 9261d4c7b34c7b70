"""Every launcher can be captured in a CUDA graph, never waits for the device, and replays with other values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_kernels.attention.row_attention import RowContext
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.drafts.candidate_walk import Codebooks, WalkDraws
from dflash_kernels.drafts.draft_tree import TreeRows, ancestor_words
from dflash_kernels.drafts.tree_path import PathRecords
from dflash_kernels.fp8.fp8_weight import FP8, Fp8Weight
from dflash_kernels.kv.rope_store import KVPlace
from dflash_kernels.kv.slot_mapping import PAD
from dflash_kernels.mixtures.dense_beside import Dense
from dflash_kernels.mixtures.mixture_config import JOINT_ROWS, MAX_EXPERT_ROWS, WARPGROUP_ROWS
from dflash_kernels.mixtures.mxfp4 import Packed, arrange_numbers, arrange_scales
from dflash_kernels.norms.sandwich_norm import Beside
from dflash_kernels.products.activation import GELU, Gate
from dflash_kernels.recurrent.delta_prompts import PromptChunks
from dflash_kernels.recurrent.delta_rule import BlockTexts, DeltaMemory, Gates, state_tiles
from dflash_kernels.recurrent.recent_conv import RowRuns
from dflash_kernels.recurrent.state_snapshots import LayerMemories, PassedRows, Snapshots
from dflash_kernels.steps.draft_odds import NUM_SUMS
from dflash_kernels.steps.row_changes import HeldRows, ReadyRows
from dflash_kernels.steps.step_rows import Bounds, RowState
from dflash_kernels.suite import REFERENCE, Kernels, triton_kernels
from dflash_testing.distributions import reject_probs
from dflash_testing.gpu import detecting_syncs
from dflash_testing.tensors import DEVICE, assert_rows_close, between_layers, normal, random_pages

R, N, H, KV, D, L, V, PAGE = 3, 4, 4, 2, 16, 2, 5000, 16
E, C, F = 24, 2, 40
BFLOAT = torch.bfloat16
Inputs = dict[str, Tensor]
Call = Callable[[Kernels, Inputs], tuple[Tensor, ...]]


def inputs(seed: int) -> Inputs:
    """Return arguments of all functions. Their shapes do not depend on the seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(DEVICE)

    pages = random_pages([40 + seed, 7 * seed, 33], KV, D, PAGE, BFLOAT, seed, spare_pages=4 - (40 + seed - 1) // PAGE)
    angles = normal(R * N, D // 2, seed=seed)
    angles = torch.cat((angles, angles), 1)
    p, q = normal(R, N, 50, seed=seed).double().softmax(-1), normal(R, N - 1, 50, seed=seed + 1).double().softmax(-1)
    return {
        "query": normal(R, N, H, D, dtype=BFLOAT, seed=seed), "keys": normal(R, N, KV, D, dtype=BFLOAT, seed=seed + 1),
        "values": normal(R, N, KV, D, dtype=BFLOAT, seed=seed + 2), "key_cache": pages.key_cache,
        "value_cache": pages.value_cache, "table": pages.page_table, "lens": pages.context_lens,
        "positions": pages.context_lens[:, None] + torch.arange(N, device=DEVICE), "reserved": pages.context_lens + 2,
        "parts": normal(3, R * N, D, seed=seed), "residual": normal(R * N, D, dtype=BFLOAT, seed=seed),
        "qkv": normal(2, R * N, (H + 2 * KV) * D, seed=seed),
        "slots": torch.randperm(60, generator=generator)[: R * N].to(DEVICE) - 5,
        "projected": normal(R * N, L, 2, KV, D, dtype=BFLOAT, seed=seed), "weights": normal(L, D, dtype=BFLOAT),
        "cos": angles.cos().to(BFLOAT), "sin": angles.sin().to(BFLOAT),
        "drafts": draw(0, 2, R, N - 1), "targets": draw(0, 2, R, N), "most": draw(0, N, R),
        "remaining": draw(0, N + 1, R), "stops": draw(-1, 3, R, 2),
        "logits": normal(R, V, dtype=BFLOAT, seed=seed) * 3, "p": p, "q": q,
        "temperatures": draw(0, 3, R).double(), "top_ks": draw(0, 30, R), "top_ps": draw(1, 11, R).double() / 10,
        "done": torch.arange(R + 1, device=DEVICE) == R, "rows": torch.tensor([2, 0, R]).to(DEVICE),
        "seeds": draw(0, 2**40, R), "places": draw(0, 4000, R),
        # Exact and different logits, so that the choice is unique; and two different experts per row.
        "routed": torch.eye(D, dtype=BFLOAT, device=DEVICE)[draw(0, D, R * N)],
        "router": torch.stack([torch.randperm(E, generator=generator) for _ in range(D)], 1).to(DEVICE, BFLOAT) / 8,
        "gate_up": normal(E, 2 * F, D, dtype=BFLOAT, seed=seed), "down": normal(E, D, F, dtype=BFLOAT, seed=seed),
        "experts": torch.stack([torch.randperm(E, generator=generator)[:C] for _ in range(R * N)]).to(DEVICE),
        "scores": normal(R * N, C, dtype=BFLOAT, seed=seed).abs(),
        "wide": normal(R * N, 64, dtype=BFLOAT, seed=seed), "bias": normal(E, 64, dtype=BFLOAT, seed=seed),
        "packed_gate_up": arrange_numbers(draw(0, 256, E, 2 * 64, 2, 16).to(torch.uint8)),
        "packed_down": arrange_numbers(draw(0, 256, E, 64, 2, 16).to(torch.uint8)),
        "scales_gate_up": arrange_scales(draw(122, 126, E, 2 * 64, 2).to(torch.uint8)),
        "scales_down": arrange_scales(draw(122, 126, E, 64, 2).to(torch.uint8)),
        "program_counts": torch.zeros(E + 1, dtype=torch.int32, device=DEVICE),
        "arrivals": torch.zeros(R * KV, dtype=torch.int32, device=DEVICE),
        # Row 2 is assigned with two pages, row R with one page. Row 0 gains one page.
        "changes": torch.cat((torch.tensor([[2, 1, 0, 2, 0], [0, 0, 1, 1, 2], [R, 1, 0, 1, 3]]).to(DEVICE),
                              draw(0, 2**40, R, 8)), 1),
        "fp8 rows": normal(R * N, 256, dtype=BFLOAT, seed=seed),
        "fp8 values": normal(E, 256, 256, seed=seed).to(FP8), "fp8 scales": normal(E, 2, 2, seed=seed).abs() / 16,
        "channels": normal(R * N, 2 * D + H * D, dtype=BFLOAT, seed=seed), "gates": normal(2, R * N, H, dtype=BFLOAT),
        "taps": normal(4, 2 * D + H * D, dtype=BFLOAT, seed=seed), "rates": normal(2, H, seed=seed),
        "ring": normal(R, N + 3, 2 * D + H * D, dtype=BFLOAT, seed=seed),
        "states": state_tiles(normal(R, H, D, D, seed=seed)).contiguous(),
        "records": normal(R, 2 * N, (H + 1) * D + H, seed=seed), "replayed": draw(0, N + 1, R),
        "texts": torch.randperm(R, generator=generator).to(DEVICE),
        "chunks": torch.tensor([[0, 7], [7, 5], [9 * seed, 0], [2, 0], [0, 1]]).to(DEVICE),
        "pieces": torch.tensor([[0, 7, 0], [7, 5, 0]]).to(DEVICE), "run_of": torch.tensor([0] * 7 + [1] * 5).to(DEVICE),
        "gained": draw(1, 90, 4), "ends": torch.tensor([2, 3, 9]).to(DEVICE) + seed,
    }  # fmt: skip


def attend(kernels: Kernels, at: Inputs, softmax: Softmax = PLAIN) -> tuple[Tensor, ...]:
    cached = [at[name] for name in ("key_cache", "value_cache", "table", "lens")]
    options = {"is_causal": False, "window": 20, "softmax": softmax}
    return (kernels.block_attention(at["query"], at["keys"], at["values"], *cached, **options),)


def attend_shared(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    """The first and second request have all rows but one each, and the others one row."""
    likely = torch.zeros(R, N - 1, dtype=torch.float64, device=DEVICE)
    likely[:2, : N - 2] = at["p"][:2, 0, :1] + 0.1
    widths, places, sources = kernels.give_rows(likely, R + 2 * (N - 2))
    rows = [at[name].flatten(0, 1)[: len(places)] for name in ("query", "keys", "values")]
    cached = [at[name] for name in ("key_cache", "value_cache", "table", "lens")]
    return (kernels.shared_attention(*rows, *cached, widths, sources, window=20),)


def attend_row(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    keys, values, table, lens = (at[name] for name in ("key_cache", "value_cache", "table", "lens"))
    slots = table.gather(1, lens[:, None] // PAGE)[:, 0] * PAGE + lens % PAGE
    context = RowContext(KVPlace(keys, values, slots), table, lens, 20, at["arrivals"])
    rows = (at["qkv"][:, :R], at["weights"][:1].expand(H + KV, D), 1e-6, at["cos"][:R], at["sin"][:R])
    attended = kernels.row_attention(*rows, KV, context)
    return attended, *(cache[slots // PAGE, slots % PAGE] for cache in (keys, values))


def empty_caches(*layers: int) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(*layers, 4, PAGE, KV, D, dtype=BFLOAT, device=DEVICE)
    return between_layers(zeros, zeros)


def store(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    keys, values = empty_caches()
    kernels.kv_store(at["keys"].flatten(0, 1), at["values"].flatten(0, 1), keys, values, at["slots"])
    return keys, values


def store_context(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    keys, values = empty_caches(L)
    kernels.context_kv_store(at["projected"], at["weights"], 1e-6, at["cos"], at["sin"], keys, values, at["slots"])
    return keys, values


def rope_store(kernels: Kernels, at: Inputs, *, is_wide: bool = False) -> tuple[Tensor, ...]:
    place = KVPlace(*empty_caches(), at["slots"])
    norms = at["weights"][:1].expand(H + KV, D)
    norms = norms.float() if is_wide else norms
    rows = kernels.rope_store(at["qkv"], norms, 1e-6, at["cos"], at["sin"], KV, place)
    return rows, place.key_cache, place.value_cache


def chosen_experts(kernels: Kernels, at: Inputs, num_rows: int) -> Tensor:
    routed = (at[name][:num_rows] for name in ("experts", "scores"))
    return kernels.experts(at["residual"][:num_rows], at["gate_up"], at["down"], *routed).float().sum(0).to(BFLOAT)


def choose_beside(kernels: Kernels, at: Inputs, num_rows: int) -> tuple[Tensor, ...]:
    dense = Dense(at["residual"][:num_rows], at["gate_up"][0], at["down"][0], GELU)
    *choice, parts = kernels.choose_beside(at["routed"][:num_rows], at["router"], C, True, None, dense)
    return *choice, parts.sum(0).to(BFLOAT)


def packed_experts(kernels: Kernels, at: Inputs, num_rows: int) -> tuple[Tensor, ...]:
    """Experts of `num_rows` rows with packed weights, biases and the gate of gpt-oss."""
    weights = (
        Packed(at[f"packed_{part}"], at[f"scales_{part}"], 64, True, at["program_counts"])
        for part in ("gate_up", "down")
    )
    biases = at["bias"].repeat(1, 2).contiguous(), at["bias"]
    names = ("wide", "experts", "scores")
    hidden, *routed = (at[name].repeat(num_rows // (R * N) + 1, 1)[:num_rows] for name in names)
    parts = kernels.experts(hidden, *weights, *routed, Gate("clamped", alpha=1.702, limit=7.0), biases)
    return (parts.float().sum(0).to(BFLOAT),)


def step_state(at: Inputs) -> RowState:
    """Return a state with one more row than the step uses. The last row is done."""
    names = ("lens", "seeds", "remaining", "reserved", "most", "seeds", "stops", "table")
    return RowState(*(at["done"], *(torch.cat((at[name], at[name][:1])) for name in names)))


def step_of(at: Inputs) -> tuple[Tensor, Bounds]:
    return at["rows"], Bounds(max_model_len=60, last_draft_len=45, page_size=PAGE, mask_id=7)


def open_step(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    rows, bounds = step_of(at)
    return tuple(kernels.open_step(step_state(at), rows, N, 3, bounds))


def close_step(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    rows, bounds = step_of(at)
    state = step_state(at)
    step = kernels.open_step(state, rows, N, N, bounds)
    is_finite = at["targets"] >= 0
    packed = kernels.close_step(state, rows, step, at["drafts"], at["targets"], step.max_accepted, is_finite)
    return *packed, state.kv_lens, state.anchors, state.remaining, state.done


def change_rows(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    state, floats = step_state(at), torch.cat((at["temperatures"], at["temperatures"][:1]))
    ints = (state.generations, state.widths, state.anchors, state.kv_lens, floats, floats.clone(), state.reserved_lens)
    held = HeldRows(*(tensor.clone() for tensor in (state.done, *ints, state.stop_ids, state.page_table)))
    kernels.change_rows(held, at["changes"], at["gained"], PAGE)
    return tuple(held)


def switch_on_rows(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    state = RowState(*(tensor.clone() for tensor in step_state(at)))
    ready = ReadyRows(at["rows"], at["places"], at["remaining"], at["seeds"][:1])
    packed = kernels.switch_on_rows(state, ready, at["targets"][:2, 0].contiguous(), at["drafts"][:2, 0] == 1)
    return packed, *state


def walk(kernels: Kernels, at: Inputs, *, is_sampled: bool) -> tuple[Tensor, ...]:
    """The inner rows of `qkv` are codebooks of 2 * R * N tokens, and of the walk's hidden states."""
    codebook = at["qkv"].flatten(0, 1) / 8
    rows = (at["scores"], at["experts"].sort(-1).values % len(codebook), at["qkv"][0])
    logits, candidates, hidden = (item.view(R, N, -1)[:, 1:].contiguous() for item in rows)
    draws = WalkDraws(at["temperatures"], at["seeds"], at["positions"][:, 1:]) if is_sampled else None
    anchors, books = at["places"] % len(codebook), Codebooks(codebook, codebook.flip(0))
    return tuple(kernels.candidate_walk(logits.float(), candidates, hidden.flatten(0, 1)[None], books, anchors, draws))


def convolve(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    dynamic = at["cos"].view(1, R * N, L, D // 2)
    convolved = kernels.block_conv(at["residual"], at["weights"], dynamic, N)
    norm = at["weights"][0]
    return convolved, *kernels.conv_add_norm(at["parts"], at["weights"], dynamic, N, at["residual"], norm, 1e-6)


def markov_walk(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    """Exact and different scores, so that the choice is unique: two bits of the token, plus its rank in an order."""
    before, after = at["routed"], at["router"]
    anchors, logits = at["places"] % len(before), at["scores"].new_zeros(2, 3, E)
    return (kernels.markov_walk(logits, before.repeat(3, 1), after, anchors[:2].contiguous() % R),)


def gates_of(at: Inputs) -> Gates:
    return Gates(*at["gates"], *at["rates"])


def delta_rule(kernels: Kernels, at: Inputs, *, is_at_once: bool = False) -> tuple[Tensor, ...]:
    keys, deltas, decays = at["records"].split((D, H * D, H), -1)
    records = (keys.unflatten(-1, (1, D)), deltas.unflatten(-1, (H, D)), -decays.abs())
    memory = DeltaMemory(at["states"].clone(), *(item.contiguous() for item in records))
    texts = BlockTexts(at["texts"], at["places"], at["places"] + at["replayed"])
    run = kernels.delta_blocks if is_at_once else kernels.delta_rule
    return run(at["channels"], gates_of(at), memory, texts), *memory


def delta_trees(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    """Recurrent layers over trees, and the move of the records of a path, which all rows but the last one commit."""
    keys, deltas, decays = (item.contiguous() for item in at["records"].split((D, H * D, H), -1))
    memory = DeltaMemory(at["states"].clone(), keys[:, :, None], deltas.unflatten(-1, (H, D)), -decays.abs())
    parents = torch.arange(N, device=DEVICE).sub(2).clamp(min=0).expand(R, -1)  # two branches
    depths = torch.arange(1, N + 1, device=DEVICE).div(2, rounding_mode="floor").expand(R, -1)
    tree = TreeRows(depths, ancestor_words(parents[:, 1:], N), parents)
    texts = BlockTexts(at["texts"], at["places"], at["places"] + at["replayed"])
    ring = at["ring"].clone()
    mixed = kernels.tree_conv(at["channels"], at["taps"], ring, RowRuns(texts.texts, texts.lens), tree)
    found = kernels.delta_blocks(at["channels"], gates_of(at), memory, texts, tree=tree)
    place = torch.arange(N - 1, device=DEVICE).expand(R, -1)
    rows, slots = torch.where(place > 0, place + 1, 0), torch.where(place < N - 2, place, PAD)
    for records in (*memory[1:], ring):
        kernels.move_records(records[None], PathRecords(texts.texts, texts.lens, rows, slots))
    return (mixed, *(item.to(BFLOAT) for item in (found, *memory, ring)))


def delta_prompts(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    states = at["states"].clone()
    chunks = PromptChunks(at["chunks"], at["pieces"])
    return kernels.delta_prompts(at["channels"], gates_of(at), states, 1, chunks), states.to(BFLOAT)


def keep_passed(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    keys, deltas, decays = at["records"].split((D, H * D, H), -1)
    records = (at["states"], keys.unflatten(-1, (1, D)), deltas.unflatten(-1, (H, D)), -decays.abs(), at["ring"])
    kept = Snapshots(torch.zeros_like(at["states"])[:, None], at["ring"].new_zeros(R, 1, 3, at["ring"].shape[2]))
    begin, end = at["places"], at["places"] + at["replayed"]
    passed = PassedRows(at["texts"], at["texts"].flip(0).contiguous(), begin, begin, end)
    memories = LayerMemories(*(item[None].contiguous() for item in records))
    kernels.keep_passed(memories, passed, kept, 2)
    return kept.states.to(BFLOAT), kept.latest


def judge(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    biases = at["p"][0, 0, : N - 1].contiguous()
    odds = kernels.draft_odds(
        at["scores"].flatten()[: R * (N - 1)].view(R, -1).sigmoid(), biases[0], biases, at["most"]
    )
    sums = biases.new_zeros(NUM_SUMS, N - 1)
    kernels.add_outcomes(sums, biases[0], biases, odds.features, at["most"] // 2, at["most"])
    added = sums.clone()
    fitted = biases[0].clone(), biases.clone(), odds.survivals[0].clone()
    kernels.refit_odds(sums, *fitted)
    return (*odds, added, sums, *fitted, *kernels.give_rows(odds.survivals, R + 2))


def fp8_weight(at: Inputs) -> Fp8Weight:
    return Fp8Weight(at["fp8 values"][0], at["fp8 scales"][0])


def rounded_rows(kernels: Kernels, at: Inputs) -> Tensor:
    """A norm rounds its rows for the product after it, [512, 256]."""
    gate_up = Fp8Weight(at["fp8 values"][:2].flatten(0, 1), at["fp8 scales"][:2].flatten(0, 1))
    rows = at["fp8 rows"]
    normed, _ = kernels.add_round_norm(rows[None], rows, torch.ones_like(rows[0]), 1e-6, gate_up)
    return kernels.fp8_gated_product(normed, gate_up)


def chosen_fp8_experts(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    """Stacks of equal matrices [256, 128] and [128, 256]. The reference reads the chosen experts on the host."""
    gate_up = Fp8Weight(at["fp8 values"][:, :, :128].contiguous(), at["fp8 scales"][:, :, :1].contiguous())
    down = Fp8Weight(at["fp8 values"][:, :128, :128].contiguous(), at["fp8 scales"][:, :1, :1].contiguous())
    rows = at["fp8 rows"][:, :128].contiguous()
    return (kernels.fp8_experts(rows, gate_up, down, at["experts"], at["scores"]).sum(0),)


def convolve_recent(kernels: Kernels, at: Inputs, *, has_blocks: bool) -> tuple[Tensor, ...]:
    ring = at["ring"].clone()
    firsts, counts, starts, texts, _ = at["chunks"]
    runs = RowRuns(at["texts"], at["places"]) if has_blocks else RowRuns(texts, starts, firsts, counts, at["run_of"])
    return kernels.recent_conv(at["channels"], at["taps"], ring, runs), ring


def sampling_rows(at: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return at["logits"], at["temperatures"], at["top_ks"], at["top_ps"]


def step_of_trees(kernels: Kernels, at: Inputs) -> tuple[Tensor, ...]:
    """Build trees, attend along their paths, follow the choices of a target, and move rows."""
    probs, ids = at["p"][:, 1:].sort(dim=2, descending=True)
    log_probs = probs[:, :, None, : N - 1].log().float()
    tree = kernels.build_tree(log_probs, ids[:, :, : N - 1], ids[:, 0, 0], at["places"], N - 1)
    cached = [at[name] for name in ("key_cache", "value_cache", "table", "lens")]
    attended = kernels.tree_attention(at["query"], at["keys"], at["values"], *cached, tree.rows, window=20)
    chosen = torch.cat((ids[:, :, 0], at["targets"][:, :1]), dim=1)
    path = kernels.follow_tree(tree, chosen, N)
    rows, bounds = step_of(at)
    state = step_state(at)
    step = kernels.open_step(state, rows, N, N, bounds)
    closed = kernels.close_tree(state, rows, step, path, chosen, step.max_accepted, at["targets"] >= 0)
    pages = at["query"].clone().view(R, 1, 2, 2, -1)
    slots = 2 * torch.arange(R, device=DEVICE)[:, None]
    kernels.move_rows(pages, slots + 1, torch.zeros_like(slots), slots)
    return attended, *tree[:3], *tree.rows, *path, *closed, state.kv_lens, pages


CALLS: dict[str, Call] = {
    "trees": step_of_trees,
    "kv_store": store,
    "rms_norm": lambda k, at: (k.rms_norm(at["query"], at["weights"][0], 1e-6),),
    "sum_rms_norm": lambda k, at: (k.sum_rms_norm(at["parts"], at["weights"][0], 1e-6, BFLOAT),),
    "add_rms_norm": lambda k, at: k.add_rms_norm(at["parts"], at["residual"], at["weights"][0], 1e-6),
    "add_rms_norm wide": lambda k, at: k.add_rms_norm(at["parts"], at["residual"], at["weights"][0].float(), 1e-6),
    "rope_store": rope_store,
    "rope_store wide": lambda k, at: rope_store(k, at, is_wide=True),
    "product": lambda k, at: (k.product(at["residual"], at["weights"]),),
    "product_parts": lambda k, at: (k.product_parts(at["residual"], at["weights"]).sum(0).to(BFLOAT),),
    "gated_product": lambda k, at: (k.gated_product(at["residual"], at["weights"]),),
    "product_parts of one row": lambda k, at: (k.product_parts(at["residual"][:1], at["weights"]).sum(0).to(BFLOAT),),
    "gated_product of one row": lambda k, at: (k.gated_product(at["residual"][:1], at["weights"]),),
    "fp8_product": lambda k, at: (k.fp8_product(at["fp8 rows"], fp8_weight(at)),),
    "fp8_product rounded before": lambda k, at: (k.fp8_product(at["fp8 rows"].repeat(3, 1), fp8_weight(at)),),
    "fp8_product_parts": lambda k, at: (k.fp8_product_parts(at["fp8 rows"], fp8_weight(at)).sum(0).to(BFLOAT),),
    "fp8_gated_product": lambda k, at: (k.fp8_gated_product(at["fp8 rows"], fp8_weight(at)),),
    "rounded rows": lambda k, at: (rounded_rows(k, at),),
    "choose_experts": lambda k, at: k.choose_experts(at["routed"], at["router"], C, True),
    "experts": lambda k, at: (chosen_experts(k, at, R * N),),
    "experts of few rows": lambda k, at: (chosen_experts(k, at, R),),
    "experts of one row": lambda k, at: (chosen_experts(k, at, 1),),
    "choose_beside": lambda k, at: choose_beside(k, at, R),
    "choose_beside of one row": lambda k, at: choose_beside(k, at, 1),
    "fp8_experts": chosen_fp8_experts,
    "packed experts": lambda k, at: packed_experts(k, at, R),
    "packed experts in one launch": lambda k, at: packed_experts(k, at, JOINT_ROWS[-1]),
    "packed experts of warpgroups": lambda k, at: packed_experts(k, at, WARPGROUP_ROWS[-1]),
    "packed experts of many rows": lambda k, at: packed_experts(k, at, MAX_EXPERT_ROWS + 9),
    "rope_store with value norms": lambda k, at: (
        k.rope_store(at["qkv"], at["weights"][:1].expand(H + 2 * KV, D), 1e-6, at["cos"], at["sin"], KV, None),
    ),
    "rope_store with keys as values": lambda k, at: (
        k.rope_store(
            at["qkv"][..., : (H + KV) * D],
            at["weights"][:1].expand(H + 2 * KV, D),
            1e-6,
            at["cos"],
            at["sin"],
            KV,
            None,
        ),
    ),
    "sandwich_norm": lambda k, at: k.sandwich_norm(
        at["parts"],
        at["residual"],
        at["weights"][0],
        at["weights"],
        1e-6,
        at["weights"][0, :1],
        Beside(at["residual"][None], at["weights"][0], at["weights"][1]),
    ),
    "choose_experts with factors": lambda k, at: k.choose_experts(
        at["routed"],
        at["router"],
        C,
        True,
        0,
        at["scores"].flatten()[:1].expand(len(at["router"])).contiguous(),
        at["scores"].flatten()[1:2].expand(len(at["router"])).contiguous(),
    ),
    "product with a bias": lambda k, at: (k.product(at["residual"], at["weights"], at["rates"][0, :L].to(BFLOAT)),),
    "gated_product gelu": lambda k, at: (k.gated_product(at["residual"], at["weights"], GELU),),
    "context_kv_store": store_context,
    "row_attention": attend_row,
    "block_attention": attend,
    "block_attention capped, with sinks": lambda k, at: attend(k, at, Softmax(2.0, at["weights"][0, :H])),
    "shared_attention": attend_shared,
    "block_conv and conv_add_norm": convolve,
    "top_tokens": lambda k, at: k.top_tokens(at["logits"], 16),
    "likely_tokens": lambda k, at: k.likely_tokens(at["logits"], 16),
    "markov_walk": markov_walk,
    "candidate_walk": lambda k, at: walk(k, at, is_sampled=False),
    "candidate_walk sampled": lambda k, at: walk(k, at, is_sampled=True),
    "recent_conv": lambda k, at: convolve_recent(k, at, has_blocks=True),
    "recent_conv of chunks": lambda k, at: convolve_recent(k, at, has_blocks=False),
    "delta_rule": delta_rule,
    "delta_blocks": lambda k, at: tuple(item.to(BFLOAT) for item in delta_rule(k, at, is_at_once=True)),
    "trees on recurrent layers": delta_trees,
    "delta_prompts": delta_prompts,
    "keep_passed": keep_passed,
    "gated_norm": lambda k, at: (
        k.gated_norm(at["query"].flatten(0, 1), at["cos"].repeat(1, H), at["taps"][0, :D].contiguous(), 1e-6),
    ),
    "output_gate": lambda k, at: (k.output_gate(at["residual"], at["parts"]),),
    "open_step": open_step,
    "close_step": close_step,
    "change_rows": change_rows,
    "switch_on_rows": switch_on_rows,
    "locate_rows": lambda k, at: k.locate_rows(at["table"], at["ends"], at["most"], at["rows"] % R, 9, PAGE),
    "argmax": lambda k, at: (k.argmax(at["logits"]),),
    "draft_odds, add_outcomes, refit_odds and give_rows": judge,
    "largest_probability": lambda k, at: k.largest_probability(at["logits"]),
    "sample": lambda k, at: k.sample(*sampling_rows(at), at["seeds"], at["places"])[:2],
    "sample greedy": lambda k, at: k.sample(*sampling_rows(at), at["seeds"], at["places"], is_greedy=True)[:2],
    "reject": lambda k, at: decided(
        *reject_probs(k, *(at[n] for n in ("drafts", "p", "q", "seeds", "places", "most")))
    ),
}


def decided(num_accepted: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """Replace arbitrary ids after the sampled token by -1."""
    return num_accepted, torch.where(torch.arange(N, device=DEVICE) <= num_accepted[:, None], ids, -1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_captured_once_and_replayed_with_other_values(name: str) -> None:
    call, kernels = CALLS[name], triton_kernels()
    static = inputs(0)
    torch.cuda.synchronize()
    with detecting_syncs():
        call(kernels, static)  # compile before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(kernels, static)
    for seed in (1, 2):
        fresh = inputs(seed)
        for key, tensor in static.items():
            tensor.copy_(fresh[key])
        graph.replay()
        for got, expected in zip(out, call(REFERENCE, fresh), strict=True):
            if got.is_floating_point():
                assert_rows_close(got, expected.double(), got.dtype)
            else:
                assert torch.equal(got, expected)
