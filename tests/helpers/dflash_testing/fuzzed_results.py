"""Readers of locks, results, dumps, prompts and journals, with sound inputs for `reader_fuzzing`."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file

from dflash_cli.acceptance.dumps.dump_format import HIDDEN, TOKENS, TextFacts, open_dump
from dflash_cli.acceptance.dumps.own_dump import METADATA, DumpedRequest, DumpManifest
from dflash_cli.acceptance.journal import Journal, JournalHead, JournalRow
from dflash_cli.checkpoints.checkpoint_identity import Identity
from dflash_cli.checkpoints.lock import read_lock
from dflash_cli.comparing.measured_result import read_result
from dflash_cli.comparing.stated_figure import read_stated_figure
from dflash_cli.documents.atomic_file import json_line
from dflash_cli.generation.answers import Answer
from dflash_cli.generation.datasets.table_files import read_records
from dflash_cli.generation.prompts import PromptRow, parse_rows
from dflash_cli.generation.run_facts import PairRun
from dflash_cli.handoff.two_servers.launch import read_launch
from dflash_cli.handoff.two_servers.server_readers import ENGINE_SERVERS
from dflash_cli.publishing.card_insertion import insert_card
from dflash_cli.publishing.model_card import ModelCard
from dflash_runtime.checkpoint.stored.digests import hash_file
from dflash_runtime.documents import copy_fields, to_json
from dflash_runtime.scheduling.request import FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_testing.evaluations import drawn_evaluation, evaluation_run
from dflash_testing.reader_fuzzing import Read, Reader, as_json, file_reader
from dflash_testing.result_samples import (
    AIPERF,
    MLX,
    SGLANG,
    SPECFORGE,
    SPECULATORS,
    SWEEP,
    VLLM,
    aiperf_record,
    specdec_bench,
)


def of_documents(home: Path) -> dict[str, Reader]:
    locked = {"name": "a", "commit": None, "sha256": {"config.json": "0" * 64}}
    head = {"schema_version": 1, "kind": "lock", "dflash": "1", "date": "2026-01-01"}
    lock = as_json({**head, "draft": locked, "target": locked})
    commands = (
        as_json({"model": "m", "kv-transfer-config": {"kv_connector": "NixlConnector"}, "port": "80", "tp": 2}),
        as_json(
            {"command": 'vllm serve m --block-size 16 --speculative-config \'{"model": "d"}\'', "version": "0.33.0"}
        ),
        b"python -m sglang.launch_server --model-path m --speculative-algorithm DFLASH --no-x --a.b 1 --tp=2 \\\n -d",
    )
    results = [
        as_json(to_json(drawn_evaluation(count=3))),
        *map(as_json, OTHER_RESULTS),
        SPECULATORS.encode(),
        _journal(),
    ]
    card = ModelCard({"tags": ["dflash"]}, "block")
    marked = insert_card("---\nlicense: mit\ntags:\n- a\n---\n# Title\n", card).text.encode()
    return {
        "lock": Reader([lock], file_reader(home / "a.lock", read_lock)),
        "result": Reader(results, file_reader(home / "result", read_result)),
        "launch": Reader(
            commands,
            file_reader(
                home / "launch", lambda path: [read_launch(path, item.keys) for item in ENGINE_SERVERS.values()]
            ),
        ),
        "figure of a card": Reader([STATED], file_reader(home / "README.md", read_stated_figure)),
        "model card": Reader(
            [marked, b"# Title\n"], lambda data: insert_card(data.decode(), card, Path("x.md")), (UnicodeDecodeError,)
        ),
        **_of_dumps(home),
    }


OTHER_RESULTS: tuple[Any, ...] = (
    VLLM, SPECFORGE, AIPERF, aiperf_record("a", 0, {"0": 1, "3": 2}), SGLANG, MLX, SWEEP, specdec_bench(2.5, 3.5),
)  # fmt: skip
"""Results in the layouts of other programs."""


STATED = b"""---
license: mit
model-index:
- name: &name draft
  results:
  - task: {type: text-generation, name: *name}
    metrics:
    - {type: acceptance_length, value: 3.439}
---
# A draft
"""


def _of_dumps(home: Path) -> dict[str, Reader]:
    """A dump of ours with one answer, and files of other engines."""
    folder, vllm = home / "dump", home / "vllm"
    folder.mkdir()
    vllm.mkdir()
    row = PromptRow(index=0, kind="prompt_token_ids", value=[1, 2])
    facts = to_json(TextFacts(row=row, prompt_len=2, answer_len=3))
    tensors = {HIDDEN: torch.randn(4, 2, 4), TOKENS: torch.arange(5)}
    file, stored = folder / "00000-0.safetensors", save(tensors, {METADATA: json.dumps(facts)})
    file.write_bytes(stored)
    request = DumpedRequest(
        file=file.name, index=0, turn=0, prompt_len=2, answer_len=3, num_tokens=5, sha256=hash_file(file)
    )
    manifest = DumpManifest(
        taps=(0, 1), taps_convention="x", dtype="float32", hidden_size=4, vocab_size=9, settings={},
        target=Identity(name="t", digest="0"), measured=copy_fields(PairRun, evaluation_run()), requests=(request,),
        is_complete=True,
    )  # fmt: skip
    (folder / "manifest.json").write_bytes(as_json(to_json(manifest)))
    sound = torch.load(io.BytesIO(_saved(tensors[HIDDEN])))

    def rows(path: Path) -> None:
        """Rows that are read are the rows that were written."""
        for text in open_dump(path).texts:
            assert torch.equal(text.read(), sound), "other rows were accepted"

    answer = {"kv_transfer_params": {"hidden_states_path": "/x/a.safetensors"}, "prompt_token_ids": [0, 1, 2]}
    choice = {"choices": [{"token_ids": [3, 4], "finish_reason": "stop"}]}
    save_file({HIDDEN: torch.randn(4, 2, 4), TOKENS: torch.arange(4)}, vllm / "a.safetensors")
    line = {
        "prompt_token_ids": [1, 2], "output_ids": [3, 4],
        "meta_info": {"hidden_states": [[[1.0, 2.0], [3.0, 4.0]], [5.0, 6.0]], "finish_reason": {"type": "stop"}},
    }  # fmt: skip

    def read_all(path: Path, layer_ids: Sequence[int]) -> None:
        for text in open_dump(path, layer_ids).texts:
            text.read()

    return {
        "dump manifest": Reader(
            [as_json(to_json(manifest))], file_reader(folder / "manifest.json", lambda _: rows(folder))
        ),
        "dump rows": Reader([stored], _kept(file, stored, lambda: rows(folder), folder / "manifest.json", manifest)),
        "vllm responses": Reader(
            [as_json({**answer, **choice})], file_reader(vllm / "responses.jsonl", lambda _: read_all(vllm, [1, 2]))
        ),
        "sglang responses": Reader(
            [as_json(line) + b"\n" + as_json(line)], file_reader(home / "s.jsonl", lambda path: read_all(path, [0, 1]))
        ),
    }


def _saved(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def _kept(file: Path, sound: bytes, read: Callable[[], object], other: Path, manifest: DumpManifest) -> Read:
    """A reader of a file that needs another file as it was, and that is written back afterwards."""

    def write_and_read(data: bytes) -> None:
        other.write_bytes(as_json(to_json(manifest)))
        file.write_bytes(data)
        try:
            read()
        finally:
            file.write_bytes(sound)

    return write_and_read


def of_rows(home: Path) -> dict[str, Reader]:
    import pyarrow
    from pyarrow import parquet

    lines = b'{"prompt": "a", "id": 1}\n\n{"messages": [{"role": "user", "content": "b"}]}\n{"turns": ["c", "d"]}\n'
    lines += b'{"prompt_token_ids": [1, 2], "category": "x", "reference": 3}\n'
    parquet.write_table(pyarrow.table({"question": ["a", "b"], "n": [1, 2]}), home / "a.parquet")

    def records(name: str) -> Read:
        return file_reader(home / name, lambda path: read_records([path]))

    return {
        "prompts": Reader([lines], lambda data: parse_rows(io.StringIO(data.decode()), "x"), (UnicodeDecodeError,)),
        "json lines": Reader([lines], records("b.jsonl")),
        "json table": Reader([as_json([{"a": 1}, {"a": "x"}]), as_json({"rows": [{"a": 1}]})], records("b.json")),
        "csv": Reader([b'a,b\n1,"x\ny"\n2,z\n'], records("b.csv")),
        "parquet": Reader([(home / "a.parquet").read_bytes()], records("b.parquet")),
        "journal": Reader(
            [_journal()], file_reader(home / "j.jsonl", lambda path: Journal(path, SETTINGS, [ROW], resume=True))
        ),
    }


SETTINGS, ROW = {"num_speculative_tokens": 3}, PromptRow(index=0, kind="prompt", value="a")


def _journal() -> bytes:
    output = RequestOutput(
        index=0, prompt_token_ids=(3,), token_ids=(1, 2, 3), finish_reason=FinishReason.LENGTH,
        acceptance_lengths=(2,), committed_lengths=(2,),
    )  # fmt: skip
    answer = JournalRow.of(
        Answer(ROW, 0, output, "a"), 3, turn=0, digest=ROW.digest, category=None, committed_lengths=(2,)
    )
    return f"{json_line(JournalHead(SETTINGS))}{json_line(answer)}".encode()
