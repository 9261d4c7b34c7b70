"""Dumps of SGLang with `--enable-return-aux-hidden-states`: responses of /generate, stored as JSON Lines.

A line is the response to one request with `return_hidden_states` and `return_prompt_token_ids`. In its `meta_info`,
`hidden_states` starts with one list of rows per prefill chunk: the rows of the prompt's tokens. Then follows one row
per decoded token, except for the last token. A row concatenates the outputs of the requested layers in layer order.

SGLang counts layers from 0, as taps do, for DFLASH, DSPARK and stated EAGLE3 ids: it captures the input of layer i + 1.
The server leaves out rows found in its prefix cache, and entries beyond the number of the answer's tokens.
Sources: SGLang 0.5.23 scheduler_components/batch_result_processor.py (_append_prefill_hidden_states,
_append_decode_hidden_states), output_streamer.py (the cut), models/qwen3.py (set_dflash_layers_to_capture).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.acceptance.dumps.dump_format import DUMP_FORMATS, Dump, DumpedText
from dflash_cli.acceptance.dumps.response_lines import finish_reason_of, parse_line, read_lines, token_list
from dflash_cli.documents.reading import open_lines, unpacked_name
from dflash_cli.generation.prompts import PromptRow
from dflash_runtime.errors import MISSING, CheckpointError, UsageError
from dflash_runtime.json_values import as_object

if TYPE_CHECKING:
    import torch


@DUMP_FORMATS.register("sglang")
class SglangDump:
    """A file of responses."""

    def matches(self, path: Path) -> bool:
        return path.is_file() and unpacked_name(path.name).suffix in (".jsonl", ".json")

    def open(self, path: Path, layer_ids: Sequence[int] | None) -> Dump:
        if layer_ids is None:
            raise UsageError(
                f"{path}: SGLang's responses do not state their layers",
                id="dump-layer-ids-missing",
                field="--dump-layer-ids",
                found=MISSING,
                hint="pass the server's --return-aux-hidden-state-layer-ids, such as --dump-layer-ids 1,9,17",
            )
        taps = tuple(sorted(set(layer_ids)))
        texts = tuple(_read_text(index, path, *line, len(taps)) for index, line in enumerate(read_lines(path)))
        size = texts[0].read().shape[2] if texts else 0
        return Dump(path=path, format="sglang", taps=taps, hidden_size=size, texts=texts)


def _read_text(index: int, file: Path, number: int, line: dict[str, Any], num_taps: int) -> DumpedText:
    """Return one response. Parsed hidden states need much memory, so `read` parses them again when they are needed."""
    where = f"{file}:{number}"
    prompt = token_list(line.get("prompt_token_ids"), "prompt_token_ids", where)
    answer = token_list(line.get("output_ids"), "output_ids", where)
    info = as_object(line.get("meta_info"))
    num_rows = len(_rows(info, where))
    if info.get("cached_tokens"):
        raise CheckpointError(
            id="cached-tokens",
            path=where,
            field="meta_info.cached_tokens",
            found=info["cached_tokens"],
            expected="0: SGLang leaves out the hidden states of cached tokens",
            hint="start the server with --disable-radix-cache",
        )
    most = len(prompt) + len(answer) - 1
    if not prompt or not len(prompt) <= num_rows <= most:
        raise CheckpointError(
            f"meta_info.hidden_states: found {num_rows} rows, expected {len(prompt)} (prompt) to {most} (with answer)",
            id="wrong-number-of-rows",
            path=where,
            field="meta_info.hidden_states",
            found=num_rows,
        )
    return DumpedText(
        row=PromptRow(index=index, kind="prompt_token_ids", value=list(prompt), id=info.get("id"), where=where),
        file=file,
        token_ids=(*prompt, *answer),
        prompt_len=len(prompt),
        answer_len=len(answer),
        num_rows=num_rows,
        read=lambda: _tensor(file, number, num_taps),
        finish_reason=finish_reason_of(as_object(info.get("finish_reason")).get("type")),
    )


def _rows(info: Mapping[str, Any], where: str) -> list[list[float]]:
    """Return all rows, with the prefill chunks flattened.

    Raises:
        CheckpointError: the rows are missing or differ in width.
    """
    entries = info.get("hidden_states")
    if not isinstance(entries, list) or not entries:
        raise CheckpointError(
            id="no-hidden-states",
            path=where,
            field="meta_info.hidden_states",
            found=MISSING,
            expected="a list of rows",
            hint="start the server with --enable-return-aux-hidden-states, and request return_hidden_states",
        )
    rows: list[list[float]] = []
    for entry in entries:
        is_chunk = isinstance(entry, list) and bool(entry) and isinstance(entry[0], list)
        rows += entry if is_chunk else [entry]
    width = len(rows[0]) if isinstance(rows[0], list) else 0
    for place, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != width or not width:
            raise CheckpointError(
                f"meta_info.hidden_states: row {place} does not hold {width} numbers",
                id="ragged-rows",
                path=where,
                field="meta_info.hidden_states",
                found=row,
            )
    return rows


def _tensor(file: Path, number: int, num_taps: int) -> "torch.Tensor":
    import torch

    where = f"{file}:{number}"
    with open_lines(file, error=CheckpointError) as stream:
        text = next(line for at, line in enumerate(stream, start=1) if at == number)
    try:
        rows = torch.tensor(_rows(as_object(parse_line(text, where).get("meta_info")), where), dtype=torch.float32)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"meta_info.hidden_states: {error}", id="not-numbers", path=where, field="meta_info.hidden_states"
        ) from error
    if rows.shape[1] % num_taps:
        raise CheckpointError(
            id="wrong-width",
            path=where,
            field="meta_info.hidden_states",
            found=rows.shape[1],
            expected=f"a width that is a multiple of the {num_taps} layers of --dump-layer-ids",
        )
    return rows.view(len(rows), num_taps, -1)
