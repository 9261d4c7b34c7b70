"""The frozen settings of an engine. Nothing here imports torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_runtime.errors import UsageError
from dflash_runtime.json_values import is_int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an engine. None and "auto" mean: decide from the checkpoints and the machine.

    drafting                 "model" drafts with a draft model. The name of a lookup ("ngram", "suffix") drafts from
                             each request's own text, without a draft and with synchronous scheduling.
    draft_confidence         results have the draft's confidence at each position: its largest probability there. Of a
                             draft with a confidence head they always have the head's predictions.
    row_budget               give the verified rows of a step to the draft tokens that are most likely accepted, of any
                             request. Their number has the most expected tokens per second on this GPU.
    max_batched_tokens       the most rows of a step with prompts, prefill and decode together. At least a quarter of
                             them is for prefill.
    kv_dtype                 "fp8" stores keys and values of both models in FP8 (e4m3). Scales of the target's
                             checkpoint are used. "auto" stores keys and values in `dtype`.
    kv_memory_bytes          the size of the page pool. Without it the pool gets the memory that
                             `gpu_memory_utilization` allows.
    max_in_flight            steps that asynchronous scheduling queues before it reads results
    graphs                   capture decode steps on a GPU as CUDA graphs
    adaptive_width           verify only as many rows of each block as give the most tokens per second on this GPU, or
                             decode plainly. The text stays the same, but the measured acceptance may be lower.
    num_tree_nodes           verify a tree of this many drafted tokens per step instead of one block. The text stays the
                             same.
    tree_candidates          the most tokens per position that may become nodes, by default all. With 1 the tree is a
                             chain.
    target_runtime           "native" runs the target with this package's code, "transformers" with transformers' code
                             over our pages if possible, and "transformers-cache" with its own cache. "auto" is native
                             if a family supports the target, otherwise transformers.
    recurrent_rows           "exact" runs the rows of a block through recurrent layers one after another, which is
                             bitwise equal to decoding row by row. "at-once" runs them in one product, which sums in
                             another order. "auto" is exact for at most `EXACT_REQUESTS` requests at a time.
    module_swaps             compute modules of a target of transformers with our kernels, where a comparison at start
                             finds the same result up to rounding
    device_map               spread a target of transformers over devices: "auto", a device, or a JSON file that maps
                             modules to devices
    snapshot_memory_bytes    memory for states of recurrent layers that the prefix cache keeps; by default 8 for each
                             request that runs at a time, in at most a quarter of the KV memory
    prefix_store             the folder that keeps prompts for later runs of the same pair
    prefix_store_bytes       the size of that folder above which the pages used least recently are removed, 64 GiB
    seed                     seeds of requests without a seed are derived from it; with None it is random
    tensor_parallel_size     split the target over this many GPUs of this machine, one process per GPU. On the CPU the
                             processes share the cores.
    all_reduce               how GPUs add up their parts: "nccl", or "one-shot", which reads the parts of small messages
                             from the memory of the other GPUs. "auto" is one-shot where the GPUs can do it.
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    kernels: str = "auto"
    num_draft_tokens: int | None = None
    num_tree_nodes: int | None = None
    tree_candidates: int | None = None
    draft_sampling: str = "greedy"
    drafting: str = "model"
    draft_confidence: bool = False
    row_budget: bool = False
    max_model_len: int | None = None
    max_num_requests: int = 16
    max_batched_tokens: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    kv_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    prefix_cache: bool = True
    snapshot_memory_bytes: int | None = None
    prefix_store: str | None = None
    prefix_store_bytes: int | None = None
    scheduling: str = "async"
    max_in_flight: int = 2
    graphs: bool = True
    adaptive_width: bool = False
    target_runtime: str = "auto"
    recurrent_rows: str = "auto"
    module_swaps: bool = True
    device_map: str | None = None
    seed: int | None = None
    tensor_parallel_size: int = 1
    all_reduce: str = "auto"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(field=name, found=getattr(self, name), expected=", ".join(choices))
        for name in ("max_num_requests", "page_size", "max_in_flight", "tensor_parallel_size"):
            _check_setting(name, getattr(self, name), least=1)
        for name in ("num_draft_tokens", "max_model_len", "max_batched_tokens", "num_pages", "kv_memory_bytes",
                     "snapshot_memory_bytes", "prefix_store_bytes", "num_tree_nodes", "tree_candidates"):  # fmt: skip
            if getattr(self, name) is not None:
                _check_setting(name, getattr(self, name), least=0 if name == "num_draft_tokens" else 1)
        if not 0 < self.gpu_memory_utilization <= 1:
            found = self.gpu_memory_utilization
            raise UsageError(field="gpu_memory_utilization", found=found, expected="above 0 and at most 1")
        self._check_tree()
        if self.device_map is not None and self.target_runtime == "native":
            raise UsageError(
                "--device-map does not go with --target-runtime native: only transformers spreads a target",
                id="device-map-of-native-target", field="device_map", found=self.device_map,
            )  # fmt: skip
        if self.tensor_parallel_size > 1 and self.wanted_runtime.startswith("transformers"):
            option = "--device-map" if self.device_map is not None else f"--target-runtime {self.target_runtime}"
            raise UsageError(
                f"--tensor-parallel does not go with {option}: only native targets are split",
                id="ranks-of-transformers", field="tensor_parallel_size", found=self.tensor_parallel_size,
                hint=f"leave out {option} or --tensor-parallel",
            )  # fmt: skip
        is_word = self.device_map is not None and self.device_map != "auto" and not self.device_map.endswith(".json")
        if is_word and not MAPPED_DEVICE.fullmatch(str(self.device_map)):
            raise UsageError(
                field="--device-map", found=self.device_map, expected="auto, a JSON file, cpu, cuda:N or disk"
            )

    def _check_tree(self) -> None:
        if self.num_tree_nodes is None:
            if self.tree_candidates is not None:
                raise UsageError(
                    "candidates of a tree need a tree", id="option-needs-another", field="tree_candidates",
                    found=self.tree_candidates, hint="add --tree N",
                )  # fmt: skip
            return
        if self.num_tree_nodes > MAX_TREE_NODES:
            expected = f"at most {MAX_TREE_NODES} nodes"
            raise UsageError(field="num_tree_nodes", found=self.num_tree_nodes, expected=expected)
        if self.num_draft_tokens == 0:
            raise UsageError(
                "a tree has draft tokens, and plain decoding drafts none",
                id="tree-without-drafts", field="num_draft_tokens", found=0, hint="leave out --tree",
            )  # fmt: skip
        if self.draft_sampling != "greedy":
            raise UsageError(
                "a tree has the draft's most likely tokens, so --tree does not go with sampled draft tokens",
                id="tree-of-sampled-drafts", field="draft_sampling", found=self.draft_sampling,
                hint="--draft-sampling greedy keeps the target's distribution too",
            )  # fmt: skip
        for name, is_set, what in (
            ("drafting", self.is_lookup, "a lookup, which finds one chain of tokens"),
            ("row_budget", self.row_budget, "a row budget, which shares out the rows of blocks"),
            ("draft_confidence", self.draft_confidence, "confidences, which are predicted for blocks"),
        ):
            if is_set:
                text, found = f"--tree does not go with {what}", getattr(self, name)
                raise UsageError(
                    text, id="tree-beside-blocks", field=name, found=found, hint="leave out one of the two"
                )

    @property
    def most_candidates(self) -> int:
        """The most tokens per position that may become nodes of a tree."""
        return self.tree_candidates or self.num_tree_nodes or 1

    @property
    def wanted_runtime(self) -> str:
        """`target_runtime`, or "transformers" if `device_map` is set: only transformers spreads a target."""
        is_hosted = self.device_map is not None and self.target_runtime != "transformers-cache"
        return "transformers" if is_hosted else self.target_runtime

    @property
    def most_exact_requests(self) -> float:
        """The most requests of a step with blocks bitwise equal to their rows one at a time."""
        return {"exact": math.inf, "at-once": 0}.get(self.recurrent_rows, EXACT_REQUESTS)

    @property
    def is_lookup(self) -> bool:
        """Whether drafts are looked up in the text of each request instead of made by a draft model."""
        return self.drafting != "model"

    @property
    def is_async(self) -> bool:
        """Whether steps are queued before the results of earlier steps are read."""
        return self.scheduling == "async"


MAX_TREE_NODES = 256
"""The largest tree. A step's time grows with its nodes, and its acceptance length hardly."""


EXACT_REQUESTS = 4
"""With more requests in a step, rows of blocks that run at once make the step 5% faster or more on an H200."""


CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float64"),
    "kv_dtype": ("auto", "fp8"),
    "kernels": ("auto", "triton", "reference"),
    "draft_sampling": ("greedy", "probabilistic"),
    "scheduling": ("async", "sync"),
    "target_runtime": ("auto", "native", "transformers", "transformers-cache"),
    "recurrent_rows": ("auto", "exact", "at-once"),
    "all_reduce": ("auto", "nccl", "one-shot"),
}
"""Engine settings with a fixed set of values."""


MAPPED_DEVICE = re.compile(r"cpu|disk|cuda(:\d{1,4})?")
"""The name of a device in a device map."""


def check_device_map(stated: Mapping[str, Any], path: Path) -> None:
    """Refuse a device map with other values than devices. Whether a device exists is known only with torch.

    Raises:
        UsageError: the map is empty, or a value is not a device.
    """
    if not stated:
        raise UsageError(path=path, field="--device-map", found={}, expected="an object from module to device")
    for module, device in stated.items():
        is_device = device >= 0 if is_int(device) else isinstance(device, str) and MAPPED_DEVICE.fullmatch(device)
        if not is_device:
            raise UsageError(path=path, field=module, found=device, expected="the number of a GPU, cpu, cuda:N or disk")


def _check_setting(name: str, value: object, least: int) -> None:
    if not is_int(value) or not least <= value < 2**63:
        is_low = is_int(value) and value < least
        expected = f"at least {least}" if is_low else f"an integer from {least} to 2**63 - 1"
        raise UsageError(field=name, found=value, expected=expected)
