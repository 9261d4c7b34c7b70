"""Files copied besides config and weights: licence, model card, tokenizer, a learned mask embedding.

Every other file, code and pickles above all, is left out and listed in the manifest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.torch_zip import read_torch_zip
from dflash_cli.conversion.changes import Change
from dflash_cli.conversion.origin import name_of
from dflash_cli.formats.dialect import Format
from dflash_cli.version import __version__
from dflash_runtime.checkpoint.canonical_names import QUANTIZATION_FILE
from dflash_runtime.checkpoint.files import MASK_FILE, PICKLE_SUFFIXES, TensorInfo, refuse_escape
from dflash_runtime.errors import CheckpointError, UnsupportedError

CARD = "README.md"
MANIFEST_FILE = "conversion.json"
MASK_PICKLE = "mask_embedding.pt"
MASK_TENSOR = "embedding"
ALLOW_HINT = "--allow-lossy converts without it"

PAPERS = ("README*", "LICENSE*", "LICENCE*", "NOTICE*")
TOKENIZER = (
    "tokenizer*", "vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*.tiktoken", "spiece.model", "sentencepiece*.model",
)  # fmt: skip
SETTINGS = ("generation_config.json", QUANTIZATION_FILE)

How = Literal["copy", "card"]


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file of the result: a copy, or the card with a section more."""

    source: Path
    name: str
    how: How = "copy"

    @property
    def change(self) -> Change:
        """For the manifest."""
        why = {"copy": "", "card": "with a section about this conversion"}[self.how]
        return Change(self.source.name, self.name, "kept", why)


def choose_side_files(
    draft: DraftCheckpoint, result: Format, *, allow_lossy: bool
) -> tuple[tuple[SideFile, ...], list[str]]:
    """The files copied beside config and weights, and warnings about them.

    Raises:
        UnsupportedError: a learned mask embedding that the result's readers would not find.
        CheckpointError: one that belongs to another draft.
    """
    files = tuple(_copied_files(draft))
    try:
        mask, warnings = _find_mask(draft, result)
    except UnsupportedError as error:
        if not allow_lossy:
            raise UnsupportedError(error.message, hint=ALLOW_HINT) from error
        mask, warnings = None, ["the learned mask embedding is left out: the result embeds masks differently"]
    return (files if mask is None else (*files, mask)), warnings


def _copied_files(draft: DraftCheckpoint) -> Iterator[SideFile]:
    """The cards, licences, tokenizer files and settings of a source."""
    path = draft.checkpoint.path
    patterns = (*PAPERS, *TOKENIZER, *SETTINGS)
    found = {item for pattern in patterns for item in path.glob(pattern) if item.is_file()}
    for item in sorted(found):
        refuse_escape(path, item)
        if item.suffix not in (*PICKLE_SUFFIXES, ".py"):
            yield SideFile(item, item.name, "card" if item.name == CARD else "copy")


def _find_mask(draft: DraftCheckpoint, result: Format) -> tuple[SideFile | None, list[str]]:
    """The learned mask embedding, as the pickle that is the one form engines read; it is looked at, never executed.

    As safetensors beside the weights it would stop loaders that read every such file as weights.
    """
    path = draft.checkpoint.path
    pickle, plain = path / MASK_PICKLE, path / MASK_FILE
    if pickle.exists():
        refuse_escape(path, pickle)
        read_mask(pickle, draft)
        if not result.keeps_mask:
            raise UnsupportedError(f"{pickle}: a learned mask embedding, which {result.title} cannot hold")
        warning = f"{MASK_PICKLE} is copied: vLLM and SGLang read it, other readers embed the mask differently"
        return SideFile(pickle, MASK_PICKLE), [warning] if result.engine is None else []
    if plain.exists():
        refuse_escape(path, plain)
        raise UnsupportedError(
            f"{plain}: a learned mask embedding, which engines read from {MASK_PICKLE} only, and which stops loaders "
            f"that take every safetensors file for weights"
        )
    return None, []


def read_mask(file: Path, draft: DraftCheckpoint) -> TensorInfo:
    """Where the embedding lies in a `mask_embedding.pt`, found without unpickling.

    Raises:
        UnsupportedError: the file holds something else.
        CheckpointError: it belongs to another mask or another width.
    """
    values = read_torch_zip(file)
    mask_id = values.get("mask_token_id", draft.config.mask_token_id)
    if mask_id != draft.config.mask_token_id:
        raise CheckpointError(f"mask_token_id {mask_id!r}, expected {draft.config.mask_token_id}", path=file)
    return _check_mask(values.get(MASK_TENSOR), file, draft)


def left_behind(draft: DraftCheckpoint, side_files: tuple[SideFile, ...]) -> Iterator[Change]:
    """The files of the source that do not go along."""
    checkpoint = draft.checkpoint
    taken = {item.source.name for item in side_files} | {item.name for item in checkpoint.weight_files}
    for item in sorted(checkpoint.path.iterdir()):
        if item.name in taken or item.name.startswith(".") or item.name == "config.json":
            continue
        if item.name.endswith(".safetensors.index.json"):
            continue
        yield Change(item.name, None, "dropped", _why(item))


def provenance(draft: DraftCheckpoint, result: Format) -> str:
    """The section that a conversion adds to the card."""
    source = name_of(draft.checkpoint.path)
    commit = f" at {source.commit}" if source.commit else ""
    return (
        "\n\n## Provenance\n\n"
        f"Converted with dflash {__version__} from `{source.name}`{commit} "
        f"({draft.detection.format.title}) to {result.title}. `{MANIFEST_FILE}` says what became of every key, tensor "
        "and file.\n"
    )


def _check_mask(tensor: object, file: Path, draft: DraftCheckpoint) -> TensorInfo:
    hidden_size = draft.config.hidden_size
    if not isinstance(tensor, TensorInfo) or tensor.num_elements != hidden_size:
        found = list(tensor.shape) if isinstance(tensor, TensorInfo) else "no tensor"
        raise CheckpointError(f"{MASK_TENSOR}: found {found}, expected [{hidden_size}]", path=file)
    return tensor


def _why(item: Path) -> str:
    if item.is_dir():
        return "a directory"
    if item.suffix == ".py":
        return "code, which is never copied"
    if item.suffix in PICKLE_SUFFIXES:
        return "a pickle file"
    if item.name == MANIFEST_FILE:
        return "the manifest of an earlier conversion"
    if item.suffix in (".safetensors", ".gguf"):
        return "weights that the checkpoint does not name"
    return "not a file that readers of a checkpoint look for"
