"""Give random bytes to each reader of files and messages from outside, in this process.

An input is identified by reader, seed and index. A reader may accept it or refuse it with a DFlashError. Everything
else is a fault: another exception, a wait past the limit, a message without an end, and an accepted input whose content
differs from what was written.
"""

import io
import json
import random
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file

from dflash_cli.acceptance.dumps.dump_format import HIDDEN, TOKENS, TextFacts, open_dump
from dflash_cli.acceptance.dumps.own_dump import METADATA, DumpedRequest, DumpManifest
from dflash_cli.acceptance.journal import Journal, JournalHead, JournalRow
from dflash_cli.checkpoints.checkpoint_identity import Identity
from dflash_cli.checkpoints.lock import read_lock
from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.checkpoints.remote_headers import Traffic, parse_listing
from dflash_cli.checkpoints.torch_zip import read_torch_zip
from dflash_cli.comparing.measured_result import read_result
from dflash_cli.documents.atomic_file import json_line
from dflash_cli.generation.answers import Answer
from dflash_cli.generation.datasets.table_files import read_records
from dflash_cli.generation.prompts import PromptRow, parse_rows
from dflash_cli.generation.run_facts import PairRun
from dflash_cli.handoff.handoff_folder import read_waiting
from dflash_cli.handoff.two_servers.launch import read_launch
from dflash_cli.handoff.two_servers.server_readers import ENGINE_SERVERS
from dflash_cli.probing.http_client import HttpClient
from dflash_cli.probing.inference_server import SERVERS, Asked, server_engines
from dflash_cli.probing.server_counters import read_counters
from dflash_cli.publishing.card_insertion import insert_card
from dflash_cli.publishing.model_card import ModelCard
from dflash_runtime.checkpoint.digests import digest_value, hash_file
from dflash_runtime.checkpoint.files import Checkpoint, parse_header
from dflash_runtime.checkpoint.forked_calls import CallFailed, ForkedCalls
from dflash_runtime.checkpoint.gguf import read_gguf_keys
from dflash_runtime.checkpoint.strict_json import loads, parse_json
from dflash_runtime.documents import copy_fields, to_json
from dflash_runtime.errors import DFlashError
from dflash_runtime.json_values import as_object
from dflash_runtime.kv_transfer import control_channel
from dflash_runtime.kv_transfer.carrier import Staged
from dflash_runtime.kv_transfer.file_connector import HEADER, TENSORS, read_handoff, write_handoff
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.kv_transfer.handoff import check_tokens
from dflash_runtime.kv_transfer.messages import (
    Drop,
    Greeting,
    Message,
    Offer,
    Refused,
    Take,
    Want,
    message_to_json,
    read_message,
)
from dflash_runtime.kv_transfer.payload_bytes import empty_like_spec, header_with_checksums
from dflash_runtime.kv_transfer.receiving import ReceivingSide
from dflash_runtime.kv_transfer.sending import SendingSide
from dflash_runtime.kv_transfer.vllm_prefills import VllmPrefill
from dflash_runtime.scheduling.request import FinishReason, RequestOutput
from dflash_testing import checkpoints as support
from dflash_testing.byte_mutations import mutate
from dflash_testing.deadline import deadline
from dflash_testing.engine_kv import layer_name, save_as_vllm
from dflash_testing.evaluations import drawn_evaluation, evaluation_run
from dflash_testing.fake_engines import FakeEngine, make_text
from dflash_testing.server_forms import METRICS, documents, llama_answer, sglang_answer, vllm_answer
from dflash_testing.transfers import are_same, make_handoff

LONGEST_S = 5.0
"""The longest time for one input, with other work on the machine."""

VOCAB_SIZE, LONGEST_MESSAGE = 100, 20_000

Read = Callable[[bytes], object]


@dataclass(frozen=True)
class Reader:
    """A reader, and sound inputs for it. `refuses` lists its errors besides DFlashError."""

    bases: Sequence[bytes]
    read: Read
    refuses: tuple[type[Exception], ...] = ()


@dataclass
class Totals:
    """How many inputs were accepted and refused, and one input of each fault, by the code line that failed."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)
    slowest_s: float = 0.0


def fuzz(name: str, reader: Reader, seed: int, indices: range, totals: Totals) -> None:
    """Give inputs to a reader and add the outcomes to `totals`."""
    for index in indices:
        generator = random.Random(f"{name} {seed} {index}")
        data = mutate(generator.choice(reader.bases), generator)
        started = time.perf_counter()
        try:
            with deadline(LONGEST_S):
                reader.read(data)
            outcome = "accepted"
        except DFlashError as error:
            outcome = "refused"
            if len(error.message) > LONGEST_MESSAGE:
                totals.faults.setdefault(f"{name}: message {error.id}", f"{seed}:{index}: {error.message[:300]!r}")
        except reader.refuses:
            outcome = "refused"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = "fault"
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{name}: {type(error).__name__} ({Path(frame.filename).name}:{frame.lineno})"
            totals.faults.setdefault(place, f"{seed}:{index}: {str(error)[:300]}")
        totals.outcomes[outcome] += 1
        totals.slowest_s = max(totals.slowest_s, time.perf_counter() - started)


def make_readers(home: Path) -> dict[str, Reader]:
    """Every reader by name. `home` is an empty directory, best in memory, for readers of files."""
    parts = (_of_json, _of_checkpoints, _of_documents, _of_rows, _of_handoffs, _of_sockets, _of_servers)
    readers: dict[str, Reader] = {}
    for part in parts:
        folder = home / part.__name__
        folder.mkdir()
        readers |= part(folder)
    return readers


def _file(path: Path, read: Callable[[Path], object]) -> Read:
    """A reader of bytes that writes them to a file for a reader of files."""

    def write_and_read(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return write_and_read


def _text(value: Any) -> bytes:
    return json.dumps(value).encode()


def _of_json(home: Path) -> dict[str, Reader]:
    bases = [
        _text(support.native_config()),
        _text({"a": [1, 2.5, None, {"b": "\u00fc"}], "c": {}}),
        b'{"a": [[1], {}]}',
        b"{}",
    ]

    def strict(data: bytes) -> None:
        value = parse_json(data, Path("x.json"))
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # whatever is accepted can be written again

    return {
        "json": Reader(bases, lambda data: json.dumps(loads(data), ensure_ascii=False).encode(), (ValueError,)),
        "strict json": Reader(bases, strict),
    }


def _of_checkpoints(home: Path) -> dict[str, Reader]:
    native = support.make_native(home / "native")
    speculators = support.make_speculators(home / "speculators")
    target = support.make_target(home / "target")
    sharded = support.write_sharded(home / "sharded", support.native_config(), support.body_arrays(), 3)
    weights, index = (native / "model.safetensors").read_bytes(), sharded / "model.safetensors.index.json"
    torch.save({"mask_embedding": torch.randn(4, 8)}, home / "mask_embedding.pt")

    def config_of(path: Path, read: Callable[[Path], object]) -> Reader:
        file = path / "config.json"
        return Reader([file.read_bytes()], _file(file, lambda _: read(path)))

    return {
        "safetensors header": Reader(
            [weights],
            lambda data: parse_header(io.BytesIO(data).read, len(data), Path("x.safetensors")),
        ),
        "index": Reader([index.read_bytes()], _file(index, lambda _: Checkpoint(sharded).tensors)),
        "native config": config_of(native, lambda path: open_draft(path).select_tensors()),
        "speculators config": config_of(speculators, lambda path: open_draft(path).select_tensors()),
        "target config": config_of(target, open_target),
        "torch.save": Reader([(home / "mask_embedding.pt").read_bytes()], _file(home / "mask.pt", read_torch_zip)),
        "gguf": Reader([_gguf()], _file(home / "a.gguf", read_gguf_keys)),
        "chat template": _chat_template(),
        "hub listing": Reader(
            [_text({"sha": "a" * 40, "siblings": [{"rfilename": "config.json"}, {"rfilename": "x/y"}]})],
            lambda data: parse_listing(data, "org/x", "https://hub/x", Traffic()),
        ),
    }


def _chat_template() -> Reader:
    """Templates that tokenizers bring, and the limits of the process that runs them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_directory() / "target")

    def render(template: str) -> str:
        return str(tokenizer.apply_chat_template(MESSAGES, chat_template=template, tokenize=False))

    calls = ForkedCalls(render, seconds=TEMPLATE_S, max_bytes=1 << 28)
    loops = "{% for a in range(2) %}{% for b in range(3) %}{{ a * b }}{{ 'x' * 4 }}{% endfor %}{% endfor %}{{ 2 ** 9 }}"
    bases = [tokenizer.chat_template.encode(), loops.encode()]
    return Reader(bases, lambda data: calls(data.decode()), (UnicodeDecodeError, CallFailed))


MESSAGES, TEMPLATE_S = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], 0.2


def _gguf() -> bytes:
    """A file with a text, a number and a list of numbers."""

    def number(value: int, size: int = 8) -> bytes:
        return value.to_bytes(size, "little")

    keys = (
        (b"general.architecture", 8, number(6) + b"dflash"),
        (b"dflash.block_count", 4, number(5, 4)),
        (b"dflash.target_layers", 9, number(4, 4) + number(2) + number(1, 4) + number(9, 4)),
    )
    body = b"".join(number(len(key)) + key + number(kind, 4) + value for key, kind, value in keys)
    return b"GGUF" + number(3, 4) + number(0) + number(len(keys)) + body


def _of_documents(home: Path) -> dict[str, Reader]:
    locked = {"name": "a", "commit": None, "sha256": {"config.json": "0" * 64}}
    head = {"schema_version": 1, "kind": "lock", "dflash": "1", "date": "2026-01-01"}
    lock = _text({**head, "draft": locked, "target": locked})
    commands = (
        _text({"model": "m", "kv-transfer-config": {"kv_connector": "NixlConnector"}, "port": "80", "tp": 2}),
        _text({"command": 'vllm serve m --block-size 16 --speculative-config \'{"model": "d"}\'', "version": "0.33.0"}),
        b"python -m sglang.launch_server --model-path m --speculative-algorithm DFLASH --no-x --a.b 1 --tp=2 \\\n -d",
    )
    results = [_text(to_json(drawn_evaluation(count=3))), *map(_text, OTHER_RESULTS), OTHER_TABLE, _journal()]
    card = ModelCard({"tags": ["dflash"]}, "block")
    marked = insert_card("---\nlicense: mit\ntags:\n- a\n---\n# Title\n", card).text.encode()
    return {
        "lock": Reader([lock], _file(home / "a.lock", read_lock)),
        "result": Reader(results, _file(home / "result", read_result)),
        "launch": Reader(
            commands,
            _file(home / "launch", lambda path: [read_launch(path, item.keys) for item in ENGINE_SERVERS.values()]),
        ),
        "model card": Reader(
            [marked, b"# Title\n"], lambda data: insert_card(data.decode(), card, Path("x.md")), (UnicodeDecodeError,)
        ),
        **_of_dumps(home),
    }


OTHER_RESULTS: tuple[Any, ...] = (
    {
        "date": "20261120-101112", "backend": "vllm", "request_throughput": 1.9, "model_id": "org/m", "completed": 8,
        "spec_decode_acceptance_length": 3.1, "spec_decode_num_drafts": 1000, "spec_decode_draft_tokens": 7000,
        "spec_decode_accepted_tokens": 2100, "spec_decode_per_position_acceptance_rates": [0.8, 0.5, 0.3],
    },
    {
        "average_acceptance_length": 4.21, "backend": "sglang", "dataset": "gsm8k", "latency_seconds": 12.5,
        "output_tokens": 8192, "samples": 64, "spec_verify_count": 1946, "throughput_tokens_per_second": 655.4,
    },
    {
        "schema_version": "1.1", "total_spec_decode_steps": {"avg": 100.0}, "request_count": {"avg": 64.0},
        "total_accepted_draft_tokens": {"avg": 140.0}, "pooled_spec_decode_acceptance_histogram": {"0": 40, "3": 40},
    },
    [{"Request_AL": {"0": {"0": 2.5}, "1": {"0": 3.5}}, "Average_AL": 3.0, "Acceptance_Length_Histogram": {"1": 3}}],
)  # fmt: skip
"""Results in the layouts of other programs; tests of importers name their sources."""
OTHER_TABLE = b"""subset,num_drafts,num_draft_tokens,num_accepted_tokens,acceptance_length,acceptance_at_pos_0
HumanEval,100.0,200.0,120.0,2.2,0.8
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
    (folder / "manifest.json").write_bytes(_text(to_json(manifest)))
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
        "dump manifest": Reader([_text(to_json(manifest))], _file(folder / "manifest.json", lambda _: rows(folder))),
        "dump rows": Reader([stored], _kept(file, stored, lambda: rows(folder), folder / "manifest.json", manifest)),
        "vllm responses": Reader(
            [_text({**answer, **choice})], _file(vllm / "responses.jsonl", lambda _: read_all(vllm, [1, 2]))
        ),
        "sglang responses": Reader(
            [_text(line) + b"\n" + _text(line)], _file(home / "s.jsonl", lambda path: read_all(path, [0, 1]))
        ),
    }


def _saved(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def _kept(file: Path, sound: bytes, read: Callable[[], object], other: Path, manifest: DumpManifest) -> Read:
    """A reader of a file that needs another file as it was, and that is written back afterwards."""

    def write_and_read(data: bytes) -> None:
        other.write_bytes(_text(to_json(manifest)))
        file.write_bytes(data)
        try:
            read()
        finally:
            file.write_bytes(sound)

    return write_and_read


def _of_rows(home: Path) -> dict[str, Reader]:
    import pyarrow
    from pyarrow import parquet

    lines = b'{"prompt": "a", "id": 1}\n\n{"messages": [{"role": "user", "content": "b"}]}\n{"turns": ["c", "d"]}\n'
    lines += b'{"prompt_token_ids": [1, 2], "category": "x", "reference": 3}\n'
    parquet.write_table(pyarrow.table({"question": ["a", "b"], "n": [1, 2]}), home / "a.parquet")

    def records(name: str) -> Read:
        return _file(home / name, lambda path: read_records([path]))

    return {
        "prompts": Reader([lines], lambda data: parse_rows(io.StringIO(data.decode()), "x"), (UnicodeDecodeError,)),
        "json lines": Reader([lines], records("b.jsonl")),
        "json table": Reader([_text([{"a": 1}, {"a": "x"}]), _text({"rows": [{"a": 1}]})], records("b.json")),
        "csv": Reader([b'a,b\n1,"x\ny"\n2,z\n'], records("b.csv")),
        "parquet": Reader([(home / "a.parquet").read_bytes()], records("b.parquet")),
        "journal": Reader(
            [_journal()], _file(home / "j.jsonl", lambda path: Journal(path, SETTINGS, [ROW], resume=True))
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


def _of_handoffs(home: Path) -> dict[str, Reader]:
    whole = make_handoff("a")
    write_handoff(home, whole)
    header, tensors = home / "a" / HEADER, home / "a" / TENSORS
    sound, rows = header.read_bytes(), tensors.read_bytes()

    def read() -> None:
        """What is accepted is what was written."""
        found = read_handoff(home / "a")
        check_tokens(found, VOCAB_SIZE)
        assert are_same(found, whole), "another hand-off was accepted"

    def read_sealed(data: bytes) -> None:
        """A header with a right digest: its text still is the text of the rows."""
        with suppress(ValueError):
            value = loads(data)
            if isinstance(value, dict):
                rest = {name: item for name, item in value.items() if name != "digest"}
                data = _text({**rest, "digest": digest_value(rest, digest_size=16)})
        header.write_bytes(data)
        try:
            found = read_handoff(home / "a")
            check_tokens(found, VOCAB_SIZE)
            read_waiting(str(home))
        finally:
            header.write_bytes(sound)
        text = (found.prompt_token_ids, found.output_token_ids)
        assert not found.tensors or text == (whole.prompt_token_ids, whole.output_token_ids), (
            "another text was accepted"
        )

    def restoring(file: Path, content: bytes) -> Read:
        def write_and_read(data: bytes) -> None:
            file.write_bytes(data)
            try:
                read()
            finally:
                file.write_bytes(content)

        return write_and_read

    return {
        "hand-off header": Reader([sound], restoring(header, sound)),
        "hand-off header, sealed again": Reader([sound], read_sealed),
        "hand-off rows": Reader([rows], restoring(tensors, rows)),
        "vllm prefill": _vllm_prefill(home / "vllm"),
    }


def _vllm_prefill(home: Path) -> Reader:
    home.mkdir()
    prompt, heads = tuple(range(20)), [[2, 4], [1, 6]]
    save_as_vllm({layer_name(number): torch.randn(20, 2, *shape) for number, shape in enumerate(heads)}, prompt, home)
    (folder,) = (item for item in home.iterdir() if item.is_dir())
    here = Fingerprint({"target KV heads": heads, "target runtime": "pages", "dtype": "float32", "page_size": 10})
    file = min(folder.glob("*.safetensors"))
    return Reader([file.read_bytes()], _file(file, lambda _: VllmPrefill(folder, prompt, 16).read("a", here)))


class _Sink:
    """A carrier without another side."""

    name, takes_device = "sink", False

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> Staged:
        return Staged(tensors)

    def send(self, staged: Staged) -> None: ...

    def release(self, staged: Staged) -> None: ...

    def allocate(self, specs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {name: empty_like_spec(spec) for name, spec in specs.items()}

    def receive(self, tensors: Mapping[str, torch.Tensor], directions: Mapping[str, Any]) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


def _of_sockets(home: Path) -> dict[str, Reader]:
    """Frames and greetings over a pair of sockets, and messages given to both sides of a connection."""
    whole = make_handoff("a")
    header = to_json(header_with_checksums(whole))
    messages = [Want("a", 0), Offer("a", 0, header, {}), Take("a", 0), Refused("b", 1, "full"), Drop("a", 0, "x")]
    lines = [_text(message_to_json(message)) for message in messages]
    frame = b"".join(len(line).to_bytes(4, "big") + line for line in lines[:1] + lines[2:])
    hello = _text({"hello": 2, "carrier": "none", "nonce": "00"})
    greeting = len(hello).to_bytes(4, "big") + hello + (13).to_bytes(4, "big") + b'{"proof":"0"}'

    def receive(data: bytes) -> None:
        here, there = socket.socketpair()
        with here, there:
            there.setblocking(False)
            with suppress(BlockingIOError):
                there.sendall(data)
            there.shutdown(socket.SHUT_WR)
            while (found := control_channel._receive(here, 100_000)) is not None:
                read_message(found)

    def greet(data: bytes) -> None:
        here, there = socket.socketpair()
        with here, there:
            there.setblocking(False)
            with suppress(BlockingIOError):
                there.sendall(data)
            there.shutdown(socket.SHUT_WR)
            own, address = Greeting(carrier="none"), control_channel.Address("x", 1)
            control_channel._meet(here, own, "secret", time.monotonic() + 1, address, is_listening=True)
            raise AssertionError("a stranger was accepted")

    def converse(data: bytes) -> None:
        jobs: list[Callable[[], None]] = []
        sending = SendingSide(_Sink(), lambda _: None, jobs.append)
        receiving = ReceivingSide(_Sink(), lambda _: None, jobs.append)
        sending.save(make_handoff("a"))
        loading = receiving.load("a")
        for line in data.split(b"\n"):
            message = read_message(as_object(loads(line)))
            if isinstance(message, Message):
                sending.read(message)
                receiving.read(message)
            while jobs:
                jobs.pop(0)()
        with suppress(Exception):
            assert are_same(loading.result(0), whole), "another hand-off was accepted"

    return {
        "frames": Reader([frame], receive, (ValueError, OSError)),
        "greetings": Reader([greeting, greeting * 2], greet, (ValueError, OSError)),
        "messages": Reader([b"\n".join(lines), *lines], converse, (ValueError,)),
    }


class _OneAnswer:
    """A client of a server that answers every request with the same bytes."""

    url, data = "http://server", b""

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return loads(self.data)

    def find(self, path: str) -> Any:
        with suppress(ValueError):
            return loads(self.data)
        return None

    def find_text(self, path: str) -> None:
        """Metrics have readers of their own."""


def _of_servers(home: Path) -> dict[str, Reader]:
    server_engines()
    readers = {"http": _http()}
    answers = {"vllm": vllm_answer, "sglang": sglang_answer, "llama.cpp": llama_answer}
    for engine, make in answers.items():
        fake = FakeEngine(style=engine, reports="detailed")  # type: ignore[arg-type]
        text = make_text((1, 2, 3), length=12)
        bases = [_text(make(fake, text)), *map(_text, documents(fake).values())]
        readers[f"answers of {engine}"] = Reader(bases, _answers_of(engine), (ValueError,))
        readers[f"metrics of {engine}"] = Reader([METRICS[engine](fake).encode()], _metrics_of(engine))
    return readers


def _metrics_of(engine: str) -> Read:
    names = SERVERS[engine].counter_names
    return lambda data: read_counters(data.decode("utf-8", errors="replace"), names, "there")


def _answers_of(engine: str) -> Read:
    def read(data: bytes) -> None:
        client: Any = _OneAnswer()
        client.data = data
        server = SERVERS[engine](client, "m")
        json.dumps(to_json(server.describe()), allow_nan=False)
        for ask in (
            lambda: server.answer([1], Asked(max_new_tokens=1)),
            lambda: server.next_logprobs([1]),
            lambda: server.encode("a"),
        ):
            with suppress(DFlashError):
                ask()
        json.dumps(to_json(server.answer([1], Asked(max_new_tokens=1))), allow_nan=False).encode()

    return read


def _http() -> Reader:
    """A server that answers each request with the bytes of the input, and ends the connection."""
    server, held = socket.create_server(("127.0.0.1", 0)), [b""]

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(65536)
                connection.sendall(held[0])
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)

    threading.Thread(target=serve, daemon=True).start()
    client = HttpClient(f"http://127.0.0.1:{server.getsockname()[1]}", num_retries=0, timeout_s=1.0)

    def ask(data: bytes) -> None:
        held[0] = data
        client.post("/x", {})

    body = b'{"a": [1, 2]}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nd\r\n" + body + b"\r\n0\r\n\r\n"
    return Reader([head + body, chunked, head.replace(b"200 OK", b"400 Bad") + body], ask)
