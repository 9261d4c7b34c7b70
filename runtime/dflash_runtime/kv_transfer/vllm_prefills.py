"""Prefills of vLLM as hand-offs: reads the files of vLLM's ExampleConnector, and never writes them.

vLLM writes one folder per prompt, named by a hash of its first tokens. The folder has one file per attention layer,
`model.layers.N.self_attn.attn.safetensors`, with one tensor `kv_cache`: keys after their norm and rope, and values. The
rows cover whole blocks without the prompt's last token, so the hand-off has only the first rows of a prompt.
The draft's layers are numbered after the target's.

    [rows, KV, 2 * D]    0.33: the keys of a head, then its values
    [rows, 2, KV, D]     0.24: all keys of a row, then all values

The files do not show the memory layout of blocks (by heads or by rows). They lack token ids: a prompt is found by its
hash. They do not name the weights, rope or taps either, so nothing can check that they belong to this pair. A draft
with rows of another draft proposes tokens that the target rejects from position 1 on.

Source: vllm/distributed/kv_transfer/kv_connector/v1/example_connector.py and model_executor/models/qwen3_dflash.py of
vLLM 0.24.0 and 0.33.0.
"""

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from dflash_runtime.checkpoint.stored.strict_json import regular_size
from dflash_runtime.errors import (
    CheckpointError,
    HandoffMismatch,
    InvalidHandoff,
    PeerUnreachable,
    UnsupportedError,
    UsageError,
)
from dflash_runtime.kv_transfer.connector import LoadingConnector
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.kv_transfer.handoff import DRAFT_PAGES, TARGET_PAGES, Handoff
from dflash_runtime.kv_transfer.handoff_folders import HASHES, prefill_folders
from dflash_runtime.scheduling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

TENSOR = "kv_cache"

LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")

NUM_THREADS = 4

ISSUE = "vllm-project/vllm#35158"
"""The vLLM change since which the connector saves the draft's rows."""

UNSAVED = (
    f"prefill with this draft and --enforce-eager (a captured draft step saves nothing), on a release with {ISSUE}"
)
"""The hint when the draft's rows were not saved."""


@dataclass(frozen=True, slots=True)
class VllmPrefill:
    """A folder with the KV of a prompt's first `num_tokens` tokens."""

    path: Path
    prompt_token_ids: tuple[int, ...]
    num_tokens: int

    def check(self, fingerprint: Fingerprint) -> dict[str, list[Path]]:
        """The files of each model's layers, after checking their headers against the pair with this fingerprint.

        Raises:
            HandoffMismatch: layers, rows, heads or dtype differ from the pair.
            InvalidHandoff: a file cannot be read.
        """
        files, heads = self._layer_files(), _heads(fingerprint)
        self._check_layers(files, len(heads[TARGET_PAGES]), len(heads[DRAFT_PAGES]))
        ordered = iter(sorted(files.items()))
        found = {name: [next(ordered)[1] for _ in shapes] for name, shapes in heads.items()}
        for name, shapes in heads.items():
            for file, shape in zip(found[name], shapes, strict=True):
                self._check_rows(file, shape, fingerprint.fields["dtype"])
        return found

    def read(self, key: str, fingerprint: Fingerprint) -> Handoff:
        """The rows as a hand-off. This fingerprint counts as the sender's, since the files lack one.

        Raises:
            HandoffMismatch: see `check`, or no row of a model was written.
            InvalidHandoff: see `check`.
        """
        heads = _heads(fingerprint)
        models = {
            name: [self._rows(file, shape[1]) for file, shape in zip(files, heads[name], strict=True)]
            for name, files in self.check(fingerprint).items()
            if files
        }
        num_rows = min(self._num_rows(models), len(self.prompt_token_ids) - 1)
        page_size = fingerprint.fields["page_size"]
        return Handoff(
            key=key,
            fingerprint=fingerprint.fields,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=(),
            params=SamplingParams(),
            seed=0,
            num_rows=dict.fromkeys(models, num_rows),
            tensors={name: _to_pages(layers, num_rows, page_size) for name, layers in models.items()},
        )

    def _layer_files(self) -> dict[int, Path]:
        """The file of each layer, by the layer's number.

        Raises:
            InvalidHandoff: two files have the same layer number.
        """
        files: dict[int, Path] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            found = LAYER_NUMBER.search(file.name)
            number = int(found[1]) if found is not None else -1
            if found is not None and files.setdefault(number, file) is not file:
                raise InvalidHandoff(
                    f"{files[number].name} and {file.name} have the same layer number",
                    id="two-files-of-a-layer", path=self.path, field="layer", found=number,
                )  # fmt: skip
        return files

    def _check_layers(self, files: Mapping[int, Path], num_target: int, num_draft: int) -> None:
        """Refuse files of other layers than the pair's. Without a draft here, the files of a draft are ignored."""
        there = f"there are files of layers {_spans(sorted(files)) or 'none'}"
        missing = [layer for layer in range(num_target + num_draft) if layer not in files]
        if missing:
            lost = [layer for layer in missing if layer < num_target] or missing
            model = "target" if lost[0] < num_target else "draft"
            raise HandoffMismatch(
                f"{there}; the {model}'s layers {_spans(lost)} are missing",
                id=f"{model}-layers-missing", path=self.path, field="layers", found=lost,
                hint=UNSAVED if model == "draft" else None,
            )  # fmt: skip
        others = [layer for layer in sorted(files) if layer >= num_target + num_draft]
        if others and num_draft:
            raise HandoffMismatch(
                f"{there}; layers {_spans(others)} belong to another draft",
                id="layers-of-another-draft", path=self.path, field="layers", found=others,
            )  # fmt: skip

    def _check_rows(self, file: Path, heads: tuple[int, int], dtype: str) -> None:
        """Refuse rows with other heads or another dtype than the layer, or fewer rows than the folder's name says."""
        try:
            regular_size(file)  # before the file is opened, because opening a pipe would wait
            with safe_open(file, "pt") as opened:
                stored = opened.get_slice(TENSOR)
                shape, found = list(stored.get_shape()), str(stored[:0].dtype).removeprefix("torch.")
        except (SafetensorError, RuntimeError, OSError, CheckpointError) as error:
            text = f"{TENSOR}: cannot be read, it may be cut short: {error}"
            raise InvalidHandoff(text, id="unreadable-tensor", path=file, field=TENSOR) from error
        if found != dtype:
            raise _of_another_dtype(file, found, dtype)
        if shape[1:] not in _row_shapes(*heads):
            raise _misshapen(file, shape, *heads)
        if shape[0] < self.num_tokens:
            raise HandoffMismatch(
                f"{TENSOR}: {shape[0]} rows, but the folder's name says {self.num_tokens} tokens: vLLM saves only the "
                "rows of a prompt's first step",
                id="too-few-rows", path=file, field=TENSOR, found=shape[0], expected=f"{self.num_tokens} rows",
                hint="prefill with --max-num-batched-tokens of at least the longest prompt",
            )  # fmt: skip

    def _rows(self, file: Path, head_dim: int) -> Tensor:
        """Keys and values of a layer: [rows, 2, KV * D]."""
        stored = load_file(file)[TENSOR][: self.num_tokens]
        return (stored.unflatten(2, (2, head_dim)).transpose(1, 2) if stored.ndim == 3 else stored).flatten(2)

    def _num_rows(self, models: Mapping[str, Sequence[Tensor]]) -> int:
        """How many rows every layer has. Rows that vLLM did not write are zeros.

        Raises:
            HandoffMismatch: vLLM wrote no row of a layer.
        """
        num_rows = {name: min(map(_num_written, layers)) for name, layers in models.items() if layers}
        for name, count in num_rows.items():
            if not count:
                model = "draft" if name == DRAFT_PAGES else "target"
                raise HandoffMismatch(
                    f"no row of the {model}'s layers was written when vLLM saved them ({ISSUE})",
                    id="no-rows-written", path=self.path, field=name, found=0, hint=UNSAVED,
                )  # fmt: skip
        fewest = min(num_rows.values())
        if fewest < self.num_tokens:
            logger.warning("%s: %d of %d rows are in every layer; the other rows are computed here",
                           self.path, fewest, self.num_tokens)  # fmt: skip
        return fewest


class VllmPrefills(LoadingConnector):
    """A connector that loads prefills of vLLM, with the keys of `find_vllm_prefills`."""

    name = "vllm-files"
    id_of_refusal = "vllm-prefills-only-load"

    def __init__(self, prefills: Mapping[str, VllmPrefill], fingerprint: Fingerprint) -> None:
        super().__init__(NUM_THREADS)
        self.prefills = prefills
        self._fingerprint = fingerprint

    def load(self, key: str) -> "Future[Handoff]":
        """See `Connector.load`. Fails at once for a prompt that vLLM has not prefilled."""
        return self._pool.submit(self._load_now, key)

    def _load_now(self, key: str) -> Handoff:
        if key not in self.prefills:
            raise PeerUnreachable("vLLM has saved no block of it", id="not-prefilled", field="key", found=key)
        return self.prefills[key].read(key, self._fingerprint)


def find_vllm_prefills(
    folder: Path, prompts: Sequence[Sequence[int]], fingerprint: Fingerprint
) -> tuple[tuple[str, ...], VllmPrefills]:
    """A key for each prompt, and a connector that loads the longest stored prefix of each prompt from a folder.

    `fingerprint` is the fingerprint of the loading pair. The prompts must be the token ids that the server received.

    Raises:
        UsageError: the folder lacks a prefill of these prompts.
        HandoffMismatch, InvalidHandoff: see `VllmPrefill.check`.
        UnsupportedError: the pair's target keeps its own cache, or its KV pages are in FP8.
    """
    if fingerprint.fields["target runtime"] == "own cache":
        text = "vLLM saves the KV of attention, and this target keeps its own cache"
        raise UnsupportedError(text, id="own-cache-target", path=folder)
    if fingerprint.fields["KV dtype"] != fingerprint.fields["dtype"]:
        text = "prefills of vLLM are read into pages in the dtype of the run, and this engine's pages are in FP8"
        raise UnsupportedError(text, id="prefills-into-fp8-pages", path=folder, field="--kv-dtype", found="fp8")
    folders = prefill_folders(folder)
    prefills = {}
    keys = tuple(f"prompt-{index + 1}" for index in range(len(prompts)))
    for key, prompt in zip(keys, prompts, strict=True):
        name, num_tokens = _longest(prompt, folders)
        if num_tokens:
            prefills[key] = VllmPrefill(folders[name], tuple(prompt), num_tokens)
            prefills[key].check(fingerprint)
    if not prefills:
        raise UsageError(
            f"{len(folders)} prefills by vLLM, but none for the {len(prompts)} prompts given",
            id="no-prompt-prefilled", path=folder, field="prompts", found=len(prompts),
            hint="give the prompts that the server was given, with the same chat template",
        )  # fmt: skip
    return keys, VllmPrefills(prefills, fingerprint)


def _longest(prompt: Sequence[int], names: Mapping[str, Path]) -> tuple[str, int]:
    """The folder with the longest prefix of a prompt, and the prefix's length in tokens. ("", 0) if none exists.

    Tries every length, since block sizes differ between servers.
    """
    found = ("", 0)
    for name in {HASHES[len(name)] for name in names}:
        digest = hashlib.new(name, usedforsecurity=False)
        for num_tokens, token in enumerate(prompt, start=1):
            digest.update(int(token).to_bytes(8, "little", signed=True))
            if num_tokens > found[1] and digest.hexdigest() in names:
                found = (digest.hexdigest(), num_tokens)
    return found


def _heads(fingerprint: Fingerprint) -> dict[str, list[tuple[int, int]]]:
    """The number of KV heads and the head size of each layer, by model."""
    fields = fingerprint.fields
    return {TARGET_PAGES: fields["target KV heads"], DRAFT_PAGES: fields.get("draft KV heads", [])}


def _row_shapes(num_heads: int, head_dim: int) -> tuple[list[int], list[int]]:
    """The shape of a row in release 0.33, and in 0.24."""
    return [num_heads, 2 * head_dim], [2, num_heads, head_dim]


def _of_another_dtype(file: Path, found: str, dtype: str) -> HandoffMismatch:
    if found == "uint8" or found.startswith("float8"):
        return HandoffMismatch(
            f"{TENSOR}: quantised ({found}), and its scales are not in the files",
            id="quantised-kv", path=file, field=TENSOR, found=found, expected=dtype,
            hint="prefill with --kv-cache-dtype auto",
        )  # fmt: skip
    return HandoffMismatch(
        f"{TENSOR}: found {found}, this engine runs {dtype}",
        id="dtype-differs", path=file, field=TENSOR, found=found, expected=dtype, hint=f"run here with --dtype {found}",
    )  # fmt: skip


def _misshapen(file: Path, shape: list[int], num_heads: int, head_dim: int) -> HandoffMismatch:
    """The error for a layer file with a shape that does not fit the pair."""
    found = f"{TENSOR}: shape {shape}"
    if len(shape) == 2:
        return HandoffMismatch(
            f"{found} belongs to latent attention (MLA), expected keys and values",
            id="latent-attention-kv", path=file, field=TENSOR, found=shape,
        )  # fmt: skip
    heads = next((n for n in shape[1:3] if shape[1:] in _row_shapes(n, head_dim)), 0)
    if 0 < heads < num_heads and num_heads % heads == 0:
        return HandoffMismatch(
            f"{found} has {heads} of {num_heads} KV heads: with tensor parallelism every worker writes this file, "
            "and only the file of the last worker remains",
            id="tensor-parallel-kv", path=file, field=TENSOR, found=shape,
            hint="prefill with --tensor-parallel-size 1",
        )  # fmt: skip
    expected = " or ".join(str(["rows", *row]).replace("'", "") for row in _row_shapes(num_heads, head_dim))
    return HandoffMismatch(
        f"{found}, expected {expected}", id="shape-differs", path=file, field=TENSOR, found=shape, expected=expected
    )


def _num_written(layer: Tensor) -> int:
    """How many rows come before the first row of zeros."""
    is_empty = ~layer.flatten(1).bool().any(1)
    return int(is_empty.int().argmax()) if bool(is_empty.any()) else len(layer)


def _to_pages(layers: Sequence[Tensor], num_rows: int, page_size: int) -> Tensor:
    """The rows [rows, 2, W] of every layer as pages [P, L, 2, page_size, widest W]."""
    num_pages = -(-num_rows // page_size)
    width = max(layer.shape[-1] for layer in layers)
    rows = layers[0].new_zeros(num_pages * page_size, len(layers), 2, width)
    for index, layer in enumerate(layers):
        rows[:num_rows, index, :, : layer.shape[-1]] = layer[:num_rows]
    return rows.view(num_pages, page_size, *rows.shape[1:]).permute(0, 2, 3, 1, 4).contiguous()


def _spans(numbers: Sequence[int]) -> str:
    """Numbers as text: `0 to 3, 6` for 0, 1, 2, 3, 6."""
    begins = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(begins, ends, strict=True))
