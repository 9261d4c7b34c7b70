"""Rules on the files of a checkpoint: are they there, and do they hold what their names say."""

from collections.abc import Iterator
from pathlib import Path

from dflash_cli.rules.rule import FIX_REEXPORT, Problem, check
from dflash_cli.rules.subject import CONFIG_FILE, Subject
from dflash_runtime.checkpoint.files import INDEX_FILE, SINGLE_FILE
from dflash_runtime.errors import CheckpointError, DFlashError, TensorMismatch
from dflash_runtime.json_values import as_object, is_int

LEFTOVERS = ("optimizer", "scheduler", "training_args", "trainer_state", "rng_state", "random_states")
INDEX_SUFFIX = ".safetensors.index.json"
FORMAT_SOURCE = "huggingface/safetensors README, Format"
FETCH = "copy or download the checkpoint again, then check it: dflash validate {draft}"


@check(
    "S18",
    effect="every reader stops, or uses another value of a repeated key than the one you see",
    fix="write the file as strict JSON, then check it: dflash validate {draft}",
    source="RFC 8259; python json accepts NaN and repeated keys",
    stage="files",
)
def config_is_strict_json(subject: Subject) -> Iterator[Problem]:
    """config.json is one strict JSON object.

    That is UTF-8, no NaN or Infinity, no key twice, no number beyond 64 bits. Parsers differ in what they make of a
    repeated key: most keep the last one without a word.
    """
    if subject.config_error is not None and CONFIG_FILE in subject.files:
        yield Problem(CONFIG_FILE, _message(subject.config_error), fix=subject.config_error.hint or "")


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
    if subject.config_error is not None and CONFIG_FILE not in subject.files:
        yield Problem(CONFIG_FILE, _message(subject.config_error), fix=subject.config_error.hint or "")
    error = subject.weights_error
    if error is not None and error.path == subject.path:
        yield Problem(SINGLE_FILE, _message(error), fix=error.hint or "")


@check(
    "N12",
    effect="loaders stop at the shard they cannot find, or leave tensors at random values",
    fix=FETCH,
    source="huggingface/transformers sharded checkpoints",
)
def index_fits_its_shards(subject: Subject) -> Iterator[Problem]:
    """The index names only shards beside it, and exactly the tensors they hold.

    A shard name with a directory in it, `..` included, is refused: a checkpoint must not reach outside its own
    directory.
    """
    error = subject.weights_error
    if error is None or error.path == subject.path:
        return
    if isinstance(error, TensorMismatch) or _is_index(error):
        yield Problem(_name(error), _message(error), fix=error.hint or "")


@check("N16", effect="loaders stop, or read other bytes than were written", fix=FETCH, source=FORMAT_SOURCE)
def headers_cover_the_file(subject: Subject) -> Iterator[Problem]:
    """Every safetensors header is sound, and its tensors cover the file exactly.

    Holes, overlaps and bytes left over are faults. A download that broke off is the usual cause.
    """
    error = subject.weights_error
    if error is None or isinstance(error, TensorMismatch) or error.path == subject.path or _is_index(error):
        return
    yield Problem(_name(error), _message(error), fix=error.hint or "")


@check(
    "C00",
    effect="no other dflash command can read the draft, so it can be neither converted nor run here",
    fix=(
        "if the key named here is wrong, correct it and run dflash validate {draft}; if it is right, this version "
        "cannot read the draft"
    ),
    source="dflash_cli/formats",
    stage="unexplained",
)
def config_can_be_read(subject: Subject) -> Iterator[Problem]:
    """config.json can be read in the dialect that it is written in.

    Reported only if no other rule explains what is wrong with config.json.
    """
    if subject.parse_error is not None:
        yield Problem(CONFIG_FILE, _message(subject.parse_error), fix=subject.parse_error.hint or "")


@check(
    "N20",
    "info",
    effect="tools that trust the number show or reserve a wrong size",
    fix="dflash validate {draft} --fix-out {out}",
    source="huggingface/transformers sharded checkpoints",
)
def index_tells_the_size(subject: Subject) -> Iterator[Problem]:
    """metadata.total_size in the index is the size of the tensors."""
    stated = as_object(_index(subject).get("metadata")).get("total_size")
    if subject.tensors is None or not is_int(stated):
        return
    actual = sum(info.num_bytes for info in subject.tensors.values())
    if stated != actual:
        yield Problem(f"{INDEX_FILE}:metadata.total_size", f"found {stated}, but the tensors take {actual} bytes")


@check(
    "N21",
    "warning",
    effect="readers that load every *.safetensors file get other tensors than readers of the index",
    fix="delete the file if it is a leftover, or write a copy without it: dflash validate {draft} --fix-out {out}",
    source="z-lab/dflash model_mlx.py loads every safetensors file",
)
def no_weights_beside_the_index(subject: Subject) -> Iterator[Problem]:
    """Every safetensors file is one that the index, or the single file, accounts for."""
    used = {info.file.name for info in (subject.tensors or {}).values()}
    for name in sorted(item for item in subject.files if item.endswith(".safetensors") and not item.startswith(".")):
        if used and name not in used and "mask_embedding" not in name:
            yield Problem(name, "not one of the files that the weights are read from")


@check(
    "S20",
    "info",
    effect="downloads grow by files that no engine reads",
    fix="leave the file out when you publish, or write a copy without it: dflash validate {draft} --fix-out {out}",
    source="NVIDIA-NeMo/Automodel epoch_*_step_* directories",
)
def no_training_state(subject: Subject) -> Iterator[Problem]:
    """The directory holds only what serving needs, and no state of the training."""
    for name in sorted(subject.files):
        if name.startswith(LEFTOVERS) or name.endswith(".distcp"):
            yield Problem(name, "left over from training")


@check(
    "S16",
    "info",
    effect="readers of GGUF and of safetensors may find two different drafts under one name",
    fix=(
        "publish the GGUF file in a repository of its own, or write a copy without it: dflash validate {draft} "
        "--fix-out {out}"
    ),
    source="ggml-org/llama.cpp#25116",
)
def no_second_format(subject: Subject) -> Iterator[Problem]:
    """The directory holds the draft in one file format only."""
    for name in sorted(item for item in subject.files if item.endswith(".gguf")):
        yield Problem(name, "a GGUF file, which is not checked here, beside the safetensors weights")


@check(
    "N22",
    effect="the layer multiplies by nothing, and no loader reports it",
    fix=FIX_REEXPORT,
    source="ikawrakow/ik_llama.cpp#2043",
)
def no_tensor_is_empty(subject: Subject) -> Iterator[Problem]:
    """Every tensor has at least one element."""
    for name, info in (subject.tensors or {}).items():
        if not info.num_elements:
            yield Problem(f"{info.file.name}:{name}", f"shape {list(info.shape)} has no elements")


def _index(subject: Subject) -> "dict[str, object]":
    """The index of the weight files, None if there is none or it cannot be read; N12 reports faults in it."""
    if subject.checkpoint is None or subject.tensors is None or INDEX_FILE not in subject.files:
        return {}
    return subject.checkpoint.read_optional_json(INDEX_FILE) or {}


def _message(error: DFlashError) -> str:
    """An error's message without the file in front, which is the finding's location."""
    path = getattr(error, "path", None)
    if path is not None:
        return error.message.removeprefix(f"{path}: ")
    before, found, after = error.message.partition(f"{CONFIG_FILE}: ")
    return after if found else before


def _name(error: CheckpointError) -> str:
    return Path(str(error.path)).name


def _is_index(error: CheckpointError) -> bool:
    return _name(error).endswith(INDEX_SUFFIX)
