"""Readers of JSON, checkpoints and templates, with sound inputs for `reader_fuzzing`."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import torch

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.checkpoints.remote_headers import Traffic, parse_listing
from dflash_cli.checkpoints.torch_zip import read_torch_zip
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.forked_calls import CallFailed, ForkedCalls
from dflash_runtime.checkpoint.stored.safetensors_header import parse_header
from dflash_runtime.checkpoint.stored.strict_json import loads, parse_json
from dflash_testing import checkpoints as support
from dflash_testing import gguf_files
from dflash_testing.reader_fuzzing import Reader, as_json, file_reader


def of_json(home: Path) -> dict[str, Reader]:
    bases = [
        as_json(support.native_config()),
        as_json({"a": [1, 2.5, None, {"b": "\u00fc"}], "c": {}}),
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


def of_checkpoints(home: Path) -> dict[str, Reader]:
    native = support.make_native(home / "native")
    speculators = support.make_speculators(home / "speculators")
    target = support.make_target(home / "target")
    sharded = support.write_sharded(home / "sharded", support.native_config(), support.body_arrays(), 3)
    weights, index = (native / "model.safetensors").read_bytes(), sharded / "model.safetensors.index.json"
    torch.save({"mask_embedding": torch.randn(4, 8)}, home / "mask_embedding.pt")

    def config_of(path: Path, read: Callable[[Path], object]) -> Reader:
        file = path / "config.json"
        return Reader([file.read_bytes()], file_reader(file, lambda _: read(path)))

    return {
        "safetensors header": Reader(
            [weights],
            lambda data: parse_header(io.BytesIO(data).read, len(data), Path("x.safetensors")),
        ),
        "index": Reader([index.read_bytes()], file_reader(index, lambda _: Checkpoint(sharded).tensors)),
        "native config": config_of(native, lambda path: open_draft(path).select_tensors()),
        "speculators config": config_of(speculators, lambda path: open_draft(path).select_tensors()),
        "target config": config_of(target, open_target),
        "torch.save": Reader(
            [(home / "mask_embedding.pt").read_bytes()], file_reader(home / "mask.pt", read_torch_zip)
        ),
        "gguf": Reader(
            [gguf_files.encode(gguf_files.metadata(), gguf_files.tensors()), _short_gguf()],
            file_reader(home / "a.gguf", lambda path: open_draft(path).select_tensors()),
        ),
        "chat template": _chat_template(),
        "hub listing": Reader(
            [as_json({"sha": "a" * 40, "siblings": [{"rfilename": "config.json"}, {"rfilename": "x/y"}]})],
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


def _short_gguf() -> bytes:
    """A file without data, so that most changes of bytes hit the header."""
    return gguf_files.encode(
        {key: gguf_files.metadata()[key] for key in ("general.architecture", "dflash.target_layers")}, {}
    )
