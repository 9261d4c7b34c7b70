"""Named sets of prompts: bundled sets, datasets and files, and the default set of a pair.

The bundled pair is a base model for Python, so its set consists of Python code. Every other target is measured on
`mix-64`, which consists of chats. The target decides the set, because acceptance depends on the text it writes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from dflash_cli.checkpoints.references import is_bundled, tiny_directory
from dflash_cli.generation.prompt_source import DatasetSource
from dflash_cli.generation.prompts import PromptRow, gather_rows, make_row
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_runtime.checkpoint.stored.digests import hash_file
from dflash_runtime.errors import UsageError

logger = logging.getLogger(__name__)

BUNDLED = "bundled"
MIX = "mix-64"
MIX_VERSION = "1"

Prompts = str | Path | Sequence[str | Sequence[int]]
"""A JSON Lines file, - for stdin, or a list of texts and lists of token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Rows with a name, and the hash of their file.

    Rows of a set with `for_chat` are questions, which go through the target's chat template by default. `dataset` has
    the dataset's repository, commit, files and format. `count` is the number of requested rows.
    """

    name: str
    rows: Sequence[PromptRow]
    sha256: str | None = None
    version: str | None = None
    for_chat: bool = False
    dataset: DatasetSource | None = None
    count: int | None = None

    def settle_chat(self, tokenizer: Tokenizer | None, *, chat: bool | None) -> bool:
        """Return whether text goes through the chat template: the user decides, else the set and the tokenizer."""
        if chat is not None:
            return chat
        return self.for_chat and tokenizer is not None and tokenizer.has_template

    def as_text(self) -> "PromptSet":
        """Return the same questions as plain text. Of a conversation, only the first turn is kept."""
        rows = [replace(row, kind="prompt", value=row.value[0]) if row.kind == "turns" else row for row in self.rows]
        return replace(self, rows=rows)


def read_prompts(
    prompts: Prompts | None, dataset: str | None = None, dataset_format: str | None = None, *, count: int | None = None
) -> PromptSet | None:
    """Return the set that the user names or gives, or None for the default. `count` is the value of --num-prompts.

    Raises:
        UsageError: a file and a dataset are both given, the dataset or format is unknown, or two counts differ.
        RequestError, CheckpointNotFound: rows are malformed or missing.
    """
    if prompts is not None and dataset is not None:
        raise UsageError(
            "prompts are given both by --prompts and by --dataset",
            id="two-prompt-sources",
            hint="leave out one of them",
        )
    if dataset is not None:
        return _read_dataset(dataset, dataset_format, count)
    if dataset_format is not None:
        raise UsageError(
            "--dataset-format needs --dataset", id="option-needs-another", field="--dataset-format",
            hint="add --dataset NAME",
        )  # fmt: skip
    if prompts is None:
        return None
    if not isinstance(prompts, str | Path):
        return PromptSet(name="given", rows=[_given_row(index, item) for index, item in enumerate(prompts)])
    sha256 = None if str(prompts) == "-" else _hash(Path(prompts))
    rows = gather_rows([], str(prompts))
    logger.info("%s: %d prompts", prompts, len(rows))
    return PromptSet(name=str(prompts), rows=rows, sha256=sha256)


def _given_row(index: int, item: str | Sequence[int]) -> PromptRow:
    """Return the row of a text or of token ids."""
    if isinstance(item, str):
        return PromptRow(index=index, kind="prompt", value=item)
    return PromptRow(index=index, kind="prompt_token_ids", value=list(item))


def gather_prompts(
    arguments: Sequence[str],
    prompts: Prompts | None,
    dataset: str | None = None,
    dataset_format: str | None = None,
    *,
    count: int | None = None,
) -> PromptSet:
    """Return the set that the user names, or the texts given as the command's arguments.

    Raises:
        UsageError: both or neither are given; see also `read_prompts`.
    """
    if arguments and (prompts is not None or dataset is not None):
        raise UsageError(
            f"prompts are given both as arguments and by {'--prompts' if dataset is None else '--dataset'}",
            id="two-prompt-sources",
            hint="leave out one of them",
        )
    named = read_prompts(prompts, dataset, dataset_format, count=count)
    return named or PromptSet(name="given", rows=gather_rows(arguments, None))


def default_prompts(target: str | None) -> PromptSet:
    """Return the bundled set for a target's reference: Python code for the bundled target, the mix for any other."""
    if target is None or is_bundled(target):
        path = tiny_directory() / "prompts.jsonl"
        return PromptSet(name=BUNDLED, rows=gather_rows([], str(path)), sha256=_hash(path))
    path = Path(str(files("dflash_cli") / "mix" / f"{MIX}.jsonl"))
    rows = gather_rows([], str(path))
    return PromptSet(name=MIX, version=MIX_VERSION, rows=rows, sha256=_hash(path), for_chat=True)


def _hash(path: Path) -> str | None:
    """Return the SHA-256 of a file; None for anything else, such as a pipe, which can be read only once."""
    return hash_file(path) if path.is_file() else None


def _read_dataset(text: str, format_name: str | None, count: int | None) -> PromptSet:
    """Return all rows of a dataset, formatted as a project formats them."""
    from dflash_cli.generation.datasets.dataset import datasets, parse_spec
    from dflash_cli.generation.datasets.places import find_files
    from dflash_cli.generation.datasets.table_files import read_records

    spec = parse_spec(text)
    if spec.count is not None and count not in (None, spec.count):
        raise UsageError(
            f"--dataset {text} asks for {spec.count} prompts, but --num-prompts for {count}",
            id="two-counts",
            field="--num-prompts",
            found=count,
            expected=str(spec.count),
            hint="leave out --num-prompts",
        )
    dataset = datasets()[spec.name]()
    chosen = dataset.choose_format(format_name)
    subset = spec.subset or dataset.subset
    found = find_files(
        spec.place or dataset.repo, subset=subset, split=dataset.split, is_subset_asked=spec.subset is not None
    )
    made = dataset.make_rows(read_records(found.paths), chosen)
    return PromptSet(
        name=spec.name if spec.subset is None else f"{spec.name}/{spec.subset}",
        rows=[make_row(fields, where, index) for index, (where, fields) in enumerate(made)],
        sha256=found.sha256,
        for_chat=True,
        count=spec.count,
        dataset=DatasetSource(
            source=spec.place or dataset.repo,
            commit=found.commit,
            files=tuple(found.names),
            subset=subset,
            format=chosen,
        ),
    )
