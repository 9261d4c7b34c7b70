"""Files of an adapter, such as LoRA, in a checkpoint's folder."""

from collections.abc import Collection

ADAPTER = "adapter_config.json"
"""If this file exists, transformers loads the model that it names instead of the checkpoint's."""

MLX_ADAPTER = "adapters.safetensors"


def adapter_files(names: Collection[str]) -> list[str]:
    """Return the files of an adapter, as PEFT and MLX name them."""
    return sorted(name for name in names if name in (ADAPTER, MLX_ADAPTER) or name.startswith("adapter_model."))


def instead_of_model(names: Collection[str]) -> str | None:
    """Return the hint for a checkpoint without config.json or weights, if its files tell what it is."""
    found = adapter_files(names)
    if found:
        return f"{found[0]}: this is an adapter, such as LoRA; merge it into its base model, and pass the merged model"
    return None
