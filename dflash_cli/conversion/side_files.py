"""Choose the files that a conversion copies besides config and weights: licence, model card, tokenizer, learned mask.

The manifest lists every file that is left out, such as code and pickles.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.torch_zip import read_torch_zip
from dflash_cli.conversion.changes import Change
from dflash_cli.conversion.manifest import Origin
from dflash_cli.formats.detection import Detection
from dflash_cli.formats.dialect import Format
from dflash_cli.version import __version__
from dflash_runtime.checkpoint.canonical_names import QUANTIZATION_FILE
from dflash_runtime.checkpoint.stored.files import INDEX_SUFFIX, MASK_FILE, PICKLE_SUFFIXES, Checkpoint, refuse_escape
from dflash_runtime.checkpoint.stored.gguf import SUFFIX
from dflash_runtime.checkpoint.stored.ignored_files import ignored_files
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.errors import MISSING, CheckpointError, UnsupportedError
from dflash_runtime.notices import Notice

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


@dataclass(frozen=True, slots=True)
class KindDraft:
    """A draft of another kind on disk, under its stored names."""

    checkpoint: Checkpoint
    detection: Detection

    @property
    def format(self) -> Format:
        """The kind of the draft."""
        return self.detection.format


def choose_side_files(
    draft: DraftCheckpoint, result: Format, *, allow_lossy: bool
) -> tuple[tuple[Path, ...], list[Notice]]:
    """The files to copy besides config and weights, and warnings about them.

    Raises:
        UnsupportedError: readers of the result would not find the learned mask embedding.
        CheckpointError: the learned mask embedding belongs to another draft.
    """
    files = tuple(copied_files(draft))
    try:
        mask, warnings = _find_mask(draft, result)
    except UnsupportedError as error:
        if not allow_lossy:
            error.hint = ALLOW_HINT
            raise
        text = "the learned mask embedding is left out: the result embeds masks differently"
        mask, warnings = None, [Notice(text, id="mask-embedding-dropped")]
    return (files if mask is None else (*files, mask)), [*warnings, *ignored_files(draft.checkpoint)]


def copied_files(draft: DraftCheckpoint | KindDraft) -> Iterator[Path]:
    """The model card, licences, tokenizer files and settings of the source."""
    path = draft.checkpoint.path
    if not path.is_dir():  # a GGUF file: its neighbours may belong to other models
        return
    patterns = (*PAPERS, *TOKENIZER, *SETTINGS)
    found = {item for pattern in patterns for item in path.glob(pattern) if item.is_file()}
    for item in sorted(found):
        refuse_escape(path, item)
        if item.suffix not in (*PICKLE_SUFFIXES, ".py") and item.name in draft.checkpoint.file_names:
            yield item


def _find_mask(draft: DraftCheckpoint, result: Format) -> tuple[Path | None, list[Notice]]:
    """The file of the learned mask embedding or None, and warnings.

    Engines read only a pickle, which is checked without executing it. A safetensors file beside the weights would stop
    loaders that read every safetensors file as weights.
    """
    path = draft.checkpoint.path
    pickle, plain = path / MASK_PICKLE, path / MASK_FILE
    if pickle.exists():
        refuse_escape(path, pickle)
        read_mask(pickle, draft)
        if not result.keeps_mask:
            raise UnsupportedError(
                f"a learned mask embedding, which {result.title} cannot hold", id="mask-embedding", path=pickle
            )
        text = f"{MASK_PICKLE} is copied: vLLM and SGLang read it, other readers embed the mask differently"
        warnings = [Notice(text, id="mask-embedding-copied")] if result.engine is None else []
        return pickle, warnings
    if plain.exists():
        refuse_escape(path, plain)
        raise UnsupportedError(
            f"a learned mask embedding, but engines read it only from {MASK_PICKLE}, and loaders that read every "
            f"safetensors file as weights stop at it",
            id="mask-embedding",
            path=plain,
        )
    return None, []


def read_mask(file: Path, draft: DraftCheckpoint) -> TensorInfo:
    """The embedding in a `mask_embedding.pt`, found without unpickling.

    Raises:
        UnsupportedError: see `read_torch_zip`.
        CheckpointError: the embedding belongs to another mask token or has another width.
    """
    values = read_torch_zip(file)
    mask_id = values.get("mask_token_id", draft.config.mask_token_id)
    if mask_id != draft.config.mask_token_id:
        expected = str(draft.config.mask_token_id)
        raise CheckpointError(id="other-mask-token", path=file, field="mask_token_id", found=mask_id, expected=expected)
    tensor, hidden_size = values.get(MASK_TENSOR), draft.config.hidden_size
    if not isinstance(tensor, TensorInfo) or tensor.num_elements != hidden_size:
        shape = list(tensor.shape) if isinstance(tensor, TensorInfo) else MISSING
        raise CheckpointError(
            id="mask-embedding-shape", path=file, field=MASK_TENSOR, found=shape, expected=f"[{hidden_size}]"
        )
    return tensor


def file_changes(draft: DraftCheckpoint | KindDraft, copied: tuple[Path, ...]) -> Iterator[Change]:
    """The change of every file of the source, other than config, weights and hidden files."""
    for item in copied:
        why = "with a section about this conversion" if item.name == CARD else ""
        yield Change(item.name, item.name, "kept", why)
    checkpoint = draft.checkpoint
    if not checkpoint.path.is_dir():
        return
    taken = {"config.json", *(item.name for item in (*copied, *checkpoint.weight_files))}
    for item in sorted(checkpoint.path.iterdir()):
        if item.name not in taken and not item.name.startswith(".") and not item.name.endswith(INDEX_SUFFIX):
            yield Change(item.name, None, "dropped", _why(item))


def provenance(draft: DraftCheckpoint | KindDraft, result: Format) -> str:
    """The section that a conversion adds to the model card."""
    source = Origin.of(draft.checkpoint.path)
    commit = f" at {source.commit}" if source.commit else ""
    return (
        "\n\n## Provenance\n\n"
        f"Converted with dflash {__version__} from `{source.name}`{commit} "
        f"({draft.detection.format.title}) to {result.title}. `{MANIFEST_FILE}` lists every key, tensor and file.\n"
    )


def _why(item: Path) -> str:
    """The reason why a file is not copied."""
    if item.is_dir():
        return "a directory"
    if item.suffix == ".py":
        return "code, which is never copied"
    if item.suffix in PICKLE_SUFFIXES:
        return "a pickle file"
    if item.name == QUANTIZATION_FILE:
        return "settings of weights that are plain in the result"
    if item.name == MANIFEST_FILE:
        return "the manifest of an earlier conversion"
    if item.suffix in (".safetensors", SUFFIX):
        return "weights that the checkpoint does not name"
    return "not a file that readers of a checkpoint look for"
