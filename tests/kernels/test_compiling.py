"""Every kernel compiles for a GPU in bfloat16, on a machine without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_testing.paths import ROOT

PROGRAM = """
import sys, torch
sys.path.insert(0, "tests/kernels")
import test_graphs
from dflash_kernels.products import product
from dflash_kernels.attention.row_attention import RowContext
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.products.activation import Gate, silu_mul
from dflash_kernels.drafts.draft_tree import TreeRows
from dflash_kernels.fp8.fp8_weight import FP8, Fp8Weight
from dflash_kernels.attention.ragged_config import LONG_CONTEXT, few_rows_shape, ragged_shape
from dflash_kernels.attention.ragged_attention import Segment, plan_ragged
from dflash_kernels.mixtures.mxfp4 import Packed
from dflash_kernels.norms.pushed_sum import Rooms
from dflash_kernels.norms.rope_norm import add_rms_norm_of_ranks
from dflash_kernels.kv.rope_store import KVPlace
from dflash_kernels.suite import triton_kernels
from dflash_testing import compiling
from dflash_testing.tensors import between_layers

IS_WHOLE, HAS_FP8_KV = sys.argv[1] in ("all", "fp8-kv"), sys.argv[1] == "fp8-kv"

def normal(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16)  # nothing runs

def some(*cases):
    return cases if IS_WHOLE else cases[:1]

def attention_calls(kernels, caches):
    size = caches[0].shape[-1]
    table = torch.ones(64, 40, dtype=torch.int64)
    for rows, requests in some((1, 64), (16, 64)) + ((16, 2),):
        block = [normal(requests, rows, heads, size) for heads in (32, 8, 8)]
        kernels.block_attention(
            *block, *caches, table[:requests], table[:requests, 0], is_causal=True, window=None,
        )
        given = [item.flatten(0, 1) for item in block]
        sources = torch.ones(requests * rows, dtype=torch.int64)
        places = table[:requests], table[:requests, 0], sources[:requests], sources
        kernels.shared_attention(*given, *caches, *places, window=None)
        words = torch.ones(requests, rows, 1, dtype=torch.int64)
        tree = TreeRows(words[..., 0], words, words[..., 0])
        kernels.tree_attention(*block, *caches, table[:requests], table[:requests, 0], tree, window=None)
    arrivals = torch.zeros(8, dtype=torch.int32)
    for heads, norms in some((6, 5), (18, 0), (9, 10)):
        parts, head_norms = normal(1, 1, 8 * heads * size), normal(8 * norms, size) if norms else None
        context = RowContext(KVPlace(*caches, table[0, :1]), table[:1], table[:1, 0], None, arrivals)
        kernels.row_attention(parts, head_norms, 1e-6, normal(1, size), normal(1, size), 8, context)
    segments = [Segment(0, 1, 600, 0), Segment(1, 60, 0, 1)]
    device, kv_itemsize = table.device, caches[0].itemsize
    shapes = [ragged_shape(size, 2, context, device, kv_itemsize) for context in (LONG_CONTEXT, 0)]
    shapes.append(few_rows_shape(size, 2, device, kv_itemsize))
    cuts = (*((shape, PLAIN) for shape in shapes), (shapes[1], Softmax(50.0, normal(32))))
    for shape, softmax in some(*cuts):
        plan = plan_ragged(segments, 32, 8, shape, device)
        block = [normal(61, heads, size) for heads in (32, 8, 8)]
        kernels.ragged_attention(*block, *caches, table, plan, torch.tensor(plan.ints), window=None, softmax=softmax)

def fp8_kv_calls():
    kernels = triton_kernels()
    caches = [cache.to(FP8) for cache in caches_of(128)]
    rows, table, slots = normal(4, 8, 128), normal(4, 128), torch.ones(4, dtype=torch.int64)
    kernels.kv_store(rows, rows, *caches, slots)
    kernels.rope_store(normal(1, 4, 48 * 128), None, 1e-6, table, table, 8, KVPlace(*caches, slots))
    layers = [cache[None] for cache in caches]
    kernels.context_kv_store(normal(4, 1, 2, 8, 128), normal(1, 128), 1e-6, table, table, *layers, slots)
    attention_calls(kernels, caches)
    for size in (256, 512):
        attention_calls(kernels, [cache.to(FP8) for cache in caches_of(size)])

def caches_of(size):
    return between_layers(normal(40, 16, 8, size), normal(40, 16, 8, size))

def calls():
    kernels = triton_kernels()
    for name, call in test_graphs.CALLS.items():
        call(kernels, test_graphs.inputs(0))
    for rows in some(1, 32):
        for weight in some(normal(256, 4096), normal(70000, 128)):
            kernels.product(normal(rows, weight.shape[1]), weight)
            kernels.product_parts(normal(rows, weight.shape[1]), weight)
            kernels.gated_product(normal(rows, weight.shape[1]), weight)
    columns = {"product_parts": 4096, "gated_product": 24576}
    for name, rows in [(name, rows) for name in columns for rows in some(16, 32, 64, 128)]:
        weight = torch.empty(columns[name], 4096, dtype=torch.bfloat16)
        getattr(kernels, name)(normal(rows, 4096), weight)
    kernels.gated_product(normal(8192, 4096), weight)
    for rows in some(1, 64, 128):
        for block in some(128, 1):
            def fp8(*shape):
                scales = torch.empty(*shape[:-2], shape[-2] // block, -(-shape[-1] // 128) if block > 1 else 1)
                return Fp8Weight(torch.empty(*shape, dtype=FP8), scales)
            kernels.fp8_product_parts(normal(rows, 4096), fp8(6144, 4096))
            kernels.fp8_gated_product(normal(rows, 4096), fp8(24576, 4096))
            routed = torch.zeros(rows, 8, dtype=torch.int64), normal(rows, 8)
            kernels.fp8_experts(normal(rows, 2048), fp8(128, 1536, 2048), fp8(128, 2048, 768), *routed)
    kernels.fp8_product(normal(64, 4096), fp8(6144, 4096))
    weights = [torch.empty(128, *shape, dtype=torch.bfloat16) for shape in ((2 * 768, 2048), (2048, 768))]
    for rows in some(1, 32, 128, 256):
        routed = kernels.choose_experts(normal(rows, 2048), normal(128, 2048), 8, True)
        kernels.experts(normal(rows, 2048), *weights, *routed)
    kernels.experts(normal(1, 2816), normal(128, 1408, 2816), normal(128, 2816, 704),
                    torch.zeros(1, 8, dtype=torch.int64), normal(1, 8))
    for columns, depth in some((8192, 2816), (2816, 8192), (128, 2816), (2880, 4096), (6144, 4096)):
        kernels.product_parts(normal(1, depth), normal(columns, depth))
    kernels.choose_experts(normal(1, 2048), normal(257, 2048), 8, True, 1)
    kernels.choose_experts(normal(1, 2880), normal(32, 2880), 4, True, 0, normal(32))
    def packed_weight(*tiles):
        numbers, scales = torch.empty(*tiles, 16, dtype=torch.int32), torch.empty(*tiles, dtype=torch.int32)
        return Packed(numbers, scales, 2880, True, torch.zeros(tiles[0] + 1, dtype=torch.int32))
    packed = [packed_weight(32, rows // 32, 23, 32) for rows in (5760, 2880)]
    clamped, biases = Gate("clamped", alpha=1.702, limit=7.0), (normal(32, 5760), normal(32, 2880))
    for rows in some(1, 2, 4, 8, 64, 200, 300):
        routed = torch.zeros(rows, 4, dtype=torch.int64), normal(rows, 4)
        kernels.experts(normal(rows, 2880), *packed, *routed, clamped, biases)
    for caches in some(*map(caches_of, (128, 256, 512))):
        attention_calls(kernels, caches)
    slots = torch.ones(2, 8, dtype=torch.int64)
    for before, count in some((1, 64), (16, 16)):
        pairs = torch.empty(2, 15, before, count)
        for number in some(15, 63, 256):
            tree = kernels.build_tree(pairs, pairs[:, :, 0].long(), slots[:, 0], slots[:, 0], number)
            kernels.follow_tree(tree, torch.ones(2, number + 1, dtype=torch.int64), 8)
    kernels.move_rows(normal(40, 36, 2, 16, 1024), slots, slots, slots)
    silu_mul(normal(40, 256))
    rooms = Rooms(torch.empty(2, 2, 8192, dtype=torch.int64), slots[0, :2], torch.ones(64, dtype=torch.int32), 1)
    add_rms_norm_of_ranks(torch.empty(3, 2, 4096), normal(2, 4096), normal(4096), 1e-6, rooms)

made = fp8_kv_calls if HAS_FP8_KV else calls
makes_code = sys.argv[1] != "few"
light = ("_gated_experts_kernel", "_down_experts_kernel", "_joint_experts_kernel")
light += ("_gated_warpgroup_kernel", "_down_warpgroup_kernel")
light += ("_row_product_kernel", "_gated_row_experts_kernel", "_down_row_experts_kernel")
light += () if makes_code else ("_tree_attention_kernel",)
every = not HAS_FP8_KV
sys.exit(compiling.run(made, is_whole=IS_WHOLE, makes_code=makes_code, light=light, needs_every_kernel=every))
"""


@pytest.mark.parametrize(
    ("shapes", "least"),
    [("few", 25), pytest.param("fp8-kv", 7, marks=pytest.mark.slow), pytest.param("all", 60, marks=pytest.mark.slow)],
    ids=["few", "fp8-kv", "all"],
)
def test_every_kernel_compiles(shapes: str, least: int, tmp_path: Path) -> None:
    """The compiler rejects code that the interpreter accepts: type changes in loops, and errors in unused branches.

    By default every kernel compiles once, to LLVM's code. `-m slow` compiles all forms to machine code.
    """
    folders = (".", "kernels", "runtime", "tests/helpers")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "TRITON_INTERPRET": "0"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, shapes]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[0]) > least


def test_kernels_know_their_strides() -> None:
    """The compiler joins the loads of adjacent numbers only if it knows that 16 divides the strides."""
    files = (ROOT / "kernels" / "dflash_kernels").rglob("*.py")
    unknown = [text for file in files for text in re.findall(r"do_not_specialize=\[(.*?)\]", file.read_text())]
    assert len(unknown) > 20
    assert not [text for text in unknown if re.search(r"stride|_row\b|_part\b", text)]
