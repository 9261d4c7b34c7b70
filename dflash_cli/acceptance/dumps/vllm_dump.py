"""Dumps of vLLM's ExampleHiddenStatesConnector: a folder with one safetensors file per request.

`hidden_states` [T, L, H] are the outputs of the requested layers, in layer order. `token_ids` [T] are their tokens. If
the request had `include_output_tokens`, these are prompt and answer without the last token; otherwise the prompt.

vLLM counts the embedding as layer 0, so tap i is vLLM's id i + 1. The files state neither the layers nor the end of
the prompt. `responses.jsonl` in the same folder has the server's response to each request (`return_token_ids` set).
It gives the end of the prompt and the last token.
Sources: vLLM 0.24.0 to 0.33.0 example_hidden_states_connector.py (request_finished, _submit_async_write),
v1/spec_decode/extract_hidden_states.py, models/interfaces.py (_maybe_add_hidden_state, called with idx + 1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_cli.acceptance.dumps.dump_format import DUMP_FORMATS, HIDDEN, TOKENS, Dump, DumpedText
from dflash_cli.acceptance.dumps.own_dump import MANIFEST
from dflash_cli.acceptance.dumps.response_lines import finish_reason_of, read_lines, token_list
from dflash_cli.acceptance.dumps.tensor_file import expect_shape, read_shapes, read_tokens, rows_reader
from dflash_cli.generation.prompts import PromptRow
from dflash_runtime.errors import MISSING, CheckpointError, UsageError
from dflash_runtime.json_values import as_object
from dflash_runtime.notices import Notice

RESPONSES = "responses.jsonl"


@dataclass(frozen=True, slots=True)
class _Response:
    """The response that belongs to one file."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    finish_reason: str | None


@DUMP_FORMATS.register("vllm")
class VllmDump:
    """Files of `--speculative-config {"method": "extract_hidden_states", ...}`."""

    def matches(self, path: Path) -> bool:
        return path.is_dir() and not (path / MANIFEST).exists() and any(path.glob("*.safetensors"))

    def open(self, path: Path, layer_ids: Sequence[int] | None) -> Dump:
        taps = _taps(path, layer_ids)
        responses = _read_responses(path / RESPONSES) if (path / RESPONSES).is_file() else None
        files = sorted(path.glob("*.safetensors"))
        size = read_shapes(files[0])[HIDDEN].shape[2]
        texts = tuple(_read_text(index, file, (len(taps), size), responses) for index, file in enumerate(files))
        note = None
        if responses is None:
            text = f"{path}: {RESPONSES} is missing, so the draft is judged on prompts as well as answers"
            note = Notice(text, id="prompts-judged")
        return Dump(path=path, format="vllm", taps=taps, hidden_size=size, texts=texts, note=note)


def _taps(path: Path, layer_ids: Sequence[int] | None) -> tuple[int, ...]:
    if layer_ids is None:
        raise UsageError(
            f"{path}: vLLM's files do not state their layers",
            id="dump-layer-ids-missing",
            field="--dump-layer-ids",
            found=MISSING,
            hint="pass the server's eagle_aux_hidden_state_layer_ids, such as --dump-layer-ids 2,10,18",
        )
    return tuple(sorted({layer - 1 for layer in layer_ids}))


def _read_responses(file: Path) -> dict[str, _Response]:
    """Return the responses by the name of the file with their hidden states."""
    found = {}
    for number, line in read_lines(file):
        where = f"{file}:{number}"
        path = as_object(line.get("kv_transfer_params")).get("hidden_states_path")
        choices = line.get("choices")
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        if not isinstance(path, str) or not isinstance(choice, dict):
            raise CheckpointError(
                "expected kv_transfer_params.hidden_states_path, and exactly one of choices",
                id="not-a-response",
                path=where,
            )
        prompt = choice.get("prompt_token_ids") or line.get("prompt_token_ids")
        found[Path(path).name] = _Response(
            token_list(prompt, "prompt_token_ids", where),
            token_list(choice.get("token_ids"), "choices[0].token_ids", where),
            choice.get("finish_reason"),
        )
    return found


def _read_text(index: int, file: Path, shape: tuple[int, int], responses: Mapping[str, _Response] | None) -> DumpedText:
    infos = read_shapes(file)
    stored, _ = read_tokens(file)
    expect_shape(infos[HIDDEN], (len(stored), *shape))
    if not stored:
        raise CheckpointError(id="no-tokens", path=file, field=TOKENS, found=[], expected="a prompt")
    response = _Response(stored[:1], stored[1:], None)
    if responses is not None:
        if file.name not in responses:
            raise CheckpointError(f"{RESPONSES} lacks the response to this request", id="missing-response", path=file)
        response = responses[file.name]
    text = (*response.prompt, *response.answer)
    if text[: len(stored)] != stored:
        raise CheckpointError(
            f"{TOKENS} differ from the response in {RESPONSES}", id="response-differs", path=file, field=TOKENS
        )
    row: dict[str, Any] = {"index": index, "id": file.stem, "where": file.name}
    return DumpedText(
        row=PromptRow(kind="prompt_token_ids", value=list(response.prompt), **row),
        file=file,
        token_ids=text,
        prompt_len=len(response.prompt),
        answer_len=len(response.answer),
        num_rows=len(stored),
        read=rows_reader(file),
        finish_reason=finish_reason_of(response.finish_reason),
    )
