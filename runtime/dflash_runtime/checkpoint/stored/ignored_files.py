"""Warnings about files that this runtime does not load although they change the model's output. Needs no torch."""

from collections.abc import Iterator

from dflash_runtime.checkpoint.stored.adapters import adapter_files
from dflash_runtime.checkpoint.stored.files import MASK_FILE, Checkpoint
from dflash_runtime.json_values import as_object
from dflash_runtime.notices import Notice

OTHER_LAYOUT = "consolidated"
"""The first word of weight files in Mistral's own layout, which repositories hold beside the files for transformers."""


def ignored_files(checkpoint: Checkpoint) -> Iterator[Notice]:
    """Yield a warning for an adapter, and for weight files that the checkpoint does not name."""
    adapter = adapter_files(checkpoint.file_names)
    if adapter:
        text = (
            f"{checkpoint.path}: the adapter ({', '.join(adapter)}) is not applied; to apply it, merge it into the "
            f"weights and pass the merged model"
        )
        yield Notice(text, id="adapter-ignored", field=adapter[0])
    others = unnamed_weights(checkpoint)
    if others:
        text = (
            f"{checkpoint.path}: {', '.join(others)} {'is' if len(others) == 1 else 'are'} not read, and other readers "
            f"may read other weights than dflash; remove the wrong weights"
        )
        yield Notice(text, id="weights-ignored", field=others[0])


def ignored_code(checkpoint: Checkpoint) -> Iterator[Notice]:
    """Yield a note if a target's config names its own code, which is never run."""
    stated = as_object(checkpoint.config.get("auto_map"))
    code = next((value for key, value in stated.items() if key.startswith("AutoModel") and isinstance(value, str)), "")
    if code:
        kind = checkpoint.config.get("model_type")
        text = f"{checkpoint.path}: its own code ({code}) is not run; it is computed like any {kind} model"
        yield Notice(text, id="code-ignored", field="auto_map")


def unnamed_weights(checkpoint: Checkpoint) -> list[str]:
    """Return the safetensors files beside the weights that the checkpoint's index or single weight file leaves out."""
    read = {file.name for file in checkpoint.weight_files}
    others = {name for name in checkpoint.file_names if name.endswith(".safetensors") and name not in read}
    left = others - {MASK_FILE, *adapter_files(others)}
    return sorted(name for name in left if not name.startswith((".", OTHER_LAYOUT)))
