"""Rules on the files of a checkpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from dflash_cli.rules.rule import FIX_COPY, FIX_REEXPORT, Problem, check
from dflash_cli.rules.subject import CONFIG_FILE, Subject
from dflash_runtime.checkpoint.stored.adapters import adapter_files
from dflash_runtime.checkpoint.stored.files import INDEX_FILE, SINGLE_FILE
from dflash_runtime.checkpoint.stored.gguf import SUFFIX
from dflash_runtime.errors import CheckpointError, DFlashError, TensorMismatch
from dflash_runtime.json_values import as_object, is_int

LEFTOVERS = ("optimizer", "scheduler", "training_args", "trainer_state", "rng_state", "random_states")
INDEX_SUFFIX = ".safetensors.index.json"
FORMAT_SOURCE = "huggingface/safetensors README, Format"
FETCH = "copy or download the checkpoint again, then check it: dflash validate {draft}"


@check(
    "S18",
    effect="readers stop, or use another value of a repeated key than you see",
    fix="write the file as strict JSON, then check it: dflash validate {draft}",
    source="RFC 8259; python json accepts repeated keys",
    stage="files",
)
def config_is_strict_json(subject: Subject) -> Iterator[Problem]:
    """config.json is one strict JSON object.

    A strict file is UTF-8, repeats no key, and keeps integers within 64 bits. Most parsers keep the last of several
    equal keys and do not warn. A key that dflash does not use may hold NaN and Infinity, which Python writes and reads.
    """
    if CONFIG_FILE in subject.files:
        yield from _of_error(subject.config_error, CONFIG_FILE)


@check(
    "S19",
    effect="there is nothing to load",
    fix=FETCH,
    source="huggingface/transformers save_pretrained layout",
    stage="files",
)
def files_are_there(subject: Subject) -> Iterator[Problem]:
    """A draft is a directory with config.json and safetensors weights.

    Pickle weights are refused, since reading them can run code.
    """
    if CONFIG_FILE not in subject.files:
        error = subject.config_error
        is_gguf = error is not None and str(error.path).endswith(SUFFIX)
        yield from _of_error(error, Path(str(error.path)).name if error is not None and is_gguf else CONFIG_FILE)
    error = subject.weights_error
    if error is not None and error.path == subject.path:
        yield from _of_error(error, SINGLE_FILE)


@check(
    "N12",
    effect="loaders stop at the missing shard, or leave tensors at random values",
    fix=FETCH,
    source="huggingface/transformers sharded checkpoints",
)
def index_fits_its_shards(subject: Subject) -> Iterator[Problem]:
    """The index names only shards in its own directory, and exactly the tensors that the shards hold.

    A shard name with a directory such as `..` is refused, because a checkpoint must not read other directories.
    """
    error = subject.weights_error
    if _is_of_index(error) and error.path != subject.path:
        yield from _of_error(error, _name(error))


@check("N16", effect="loaders stop, or read wrong bytes", fix=FETCH, source=FORMAT_SOURCE)
def headers_cover_the_file(subject: Subject) -> Iterator[Problem]:
    """Every safetensors header is valid, and its tensors cover the file exactly.

    Holes, overlaps and leftover bytes are faults. The usual cause is an interrupted download.
    """
    error = subject.weights_error
    if error is not None and error.path != subject.path and not _is_of_index(error):
        yield from _of_error(error, _name(error))


@check(
    "C00",
    effect="no other dflash command can read the draft, so dflash can neither convert nor run it",
    fix="if the key is wrong, correct it: dflash validate {draft}; if it is right, this dflash cannot read the draft",
    source="dflash_cli/formats",
    stage="unexplained",
)
def config_can_be_read(subject: Subject) -> Iterator[Problem]:
    """The draft's dialect can read config.json.

    Reported only if no other rule names the fault in config.json.
    """
    yield from _of_error(subject.parse_error, CONFIG_FILE)


@check(
    "N20",
    "info",
    effect="tools that trust this number show or reserve a wrong size",
    fix=FIX_COPY,
    source="huggingface/transformers sharded checkpoints",
)
def index_tells_the_size(subject: Subject) -> Iterator[Problem]:
    """metadata.total_size in the index equals the size of the tensors."""
    stated = as_object(_index(subject).get("metadata")).get("total_size")
    if subject.tensors is None or not is_int(stated):
        return
    actual = sum(info.num_bytes for info in subject.tensors.values())
    if stated != actual:
        yield Problem(f"{INDEX_FILE}:metadata.total_size", f"found {stated}, but the tensors take {actual} bytes")


@check(
    "N21",
    "warning",
    effect="readers that load every *.safetensors file load other tensors than readers of the index",
    fix=f"delete the file if it is a leftover, or write a copy without it: {FIX_COPY}",
    source="z-lab/dflash model_mlx.py loads every safetensors file",
)
def no_weights_beside_the_index(subject: Subject) -> Iterator[Problem]:
    """Readers of the index use every safetensors file in the directory."""
    used = {info.file.name for info in (subject.tensors or {}).values()}
    others = subject.files - {*adapter_files(subject.files)}
    for name in sorted(item for item in others if item.endswith(".safetensors") and not item.startswith(".")):
        if used and name not in used and "mask_embedding" not in name:
            yield Problem(name, "the weights are not read from this file")


@check(
    "S51",
    "warning",
    effect="dflash leaves the adapter out, and transformers loads the model that the adapter names instead",
    fix="merge the adapter into the weights or delete its files, then check again: dflash validate {draft}",
    source="huggingface/transformers PeftAdapterMixin; huggingface/peft save_pretrained layout",
)
def no_adapter_beside_the_weights(subject: Subject) -> Iterator[Problem]:
    """Neither the draft's directory nor the target's holds an adapter, such as LoRA."""
    of_target = subject.target_source.checkpoint.file_names if subject.target_source is not None else ()
    for prefix, files in (("", subject.files), ("target ", of_target)):
        for name in adapter_files(files)[:1]:
            yield Problem(f"{prefix}{name}", "an adapter beside the weights, which is not applied")


@check(
    "S20",
    "info",
    effect="the download contains files that no engine reads",
    fix=f"leave the file out when you publish, or write a copy without it: {FIX_COPY}",
    source="NVIDIA-NeMo/Automodel epoch_*_step_* directories",
)
def no_training_state(subject: Subject) -> Iterator[Problem]:
    """The directory holds only files for serving, and no training state."""
    for name in sorted(subject.files):
        if name.startswith(LEFTOVERS) or name.endswith(".distcp"):
            yield Problem(name, "left over from training")


@check(
    "S16",
    "info",
    effect="readers of GGUF and of safetensors may find two different drafts under one name",
    fix=f"publish the GGUF file in a repository of its own, or write a copy without it: {FIX_COPY}",
    source="ggml-org/llama.cpp#25116",
)
def no_second_format(subject: Subject) -> Iterator[Problem]:
    """The directory holds the draft in one file format."""
    for name in sorted(item for item in subject.files if item.endswith(".gguf") and not subject.format.one_file):
        yield Problem(name, "a GGUF file beside the safetensors weights; dflash does not check it")


@check(
    "N22",
    effect="the layer computes with an empty tensor, and no loader reports it",
    fix=FIX_REEXPORT,
    source="ikawrakow/ik_llama.cpp#2043",
)
def no_tensor_is_empty(subject: Subject) -> Iterator[Problem]:
    """Every tensor has at least one element."""
    for name, info in (subject.tensors or {}).items():
        if not info.num_elements:
            yield Problem(f"{info.file.name}:{name}", f"empty: shape {list(info.shape)}")


def _index(subject: Subject) -> dict[str, object]:
    """The index of the weight files; empty if it is absent or cannot be read. N12 reports its faults."""
    if subject.checkpoint is None or subject.tensors is None or INDEX_FILE not in subject.files:
        return {}
    return subject.checkpoint.read_optional_json(INDEX_FILE) or {}


def _of_error(error: DFlashError | None, location: str) -> Iterator[Problem]:
    """The problem of a reader's error, with the error's message without its path."""
    if error is not None:
        message = error.message.removeprefix(f"{error.path}: ").rpartition(f"{CONFIG_FILE}: ")[2]
        yield Problem(location, message, fix=error.hint or "")


def _name(error: CheckpointError) -> str:
    return Path(str(error.path)).name


def _is_of_index(error: CheckpointError | None) -> TypeGuard[CheckpointError]:
    """Whether the index of the weight files is malformed, or names other tensors than the shards hold."""
    return error is not None and (isinstance(error, TensorMismatch) or _name(error).endswith(INDEX_SUFFIX))
