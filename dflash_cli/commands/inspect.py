"""`dflash inspect`: what a checkpoint is, or how two differ."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_cli import console
from dflash_cli.checkpoints.description import Description, Difference, compare, describe, describe_layers
from dflash_cli.checkpoints.references import Role, locate, resolve
from dflash_cli.options import JsonOption
from dflash_runtime.config import DraftConfig, TargetConfig
from dflash_runtime.errors import UsageError

ReferenceArg = Annotated[str, typer.Argument(metavar="REF", help="A directory, org/repo[@rev], or tiny.")]
OtherArg = Annotated[str | None, typer.Argument(metavar="[REF2]", help="Show the differences to this one.")]
TensorsOption = Annotated[bool, typer.Option("--tensors", help="List every tensor.")]


def inspect(
    reference: ReferenceArg, other: OtherArg = None, tensors: TensorsOption = False, as_json: JsonOption = False
) -> None:
    """Describe a draft or a target; with two references, show the differences."""
    # Bytes are compared only between two, so one alone is read by its headers.
    place = locate(reference, Role.DRAFT) if other is None else resolve(reference, Role.DRAFT)
    first = describe(place)
    if not isinstance(place, Path):
        console.status(f"{place.path}: {place.traffic.text}")
    if other is None:
        if as_json:
            console.result_json(first.document(with_tensors=tensors))
        else:
            _print(first, with_tensors=tensors)
        return
    second = describe(resolve(other, Role.DRAFT))
    if type(first.config) is not type(second.config):
        raise UsageError(f"{reference} is a {_kind(first)} and {other} a {_kind(second)}: nothing to compare")
    difference = compare(first, second)
    if as_json:
        console.result_json(_difference_document(first, second, difference))
    else:
        _print_difference(difference)


def _print(found: Description, *, with_tensors: bool) -> None:
    rows = _draft_rows(found.config) if isinstance(found.config, DraftConfig) else _target_rows(found.config)
    title = f"{found.title} ({found.evidence})" if found.evidence else found.title
    for label, text in [("kind", title), *rows, ("weights", _weights(found)), ("files", _files(found))]:
        console.result(f"{label:11} {text}")
    if found.borrowed:
        console.result(f"{'skipped':11} {', '.join(found.borrowed)}")
    if found.carried:
        console.result(f"{'other keys':11} {', '.join(sorted(found.carried))}")
    for note in found.notes:
        console.note(note)
    if with_tensors:
        for info in found.checkpoint.tensors.values():
            console.result(f"  {info.name}  {info.dtype}  {list(info.shape)}")


def _draft_rows(config: DraftConfig) -> list[tuple[str, str]]:
    depth = f" of {config.num_target_layers}" if config.num_target_layers is not None else ""
    taps = ", ".join(map(str, config.target_layer_ids))
    reduced = f", drafts over {config.draft_vocab_size} of them" if config.has_reduced_vocab else ""
    rows = [
        ("block", f"{config.block_size} ({config.num_draft_tokens} drafted after the anchor)"),
        ("taps", f"outputs of layers {taps}{depth}, counted from 0"),
        ("mask", f"token {config.mask_token_id}"),
        ("attention", describe_layers(config)),
        ("rope", _rope(config)),
        ("sizes", f"{_sizes(config)}, {config.num_taps} taps of {config.feature_size}"),
        ("vocabulary", f"{config.vocab_size} ids{reduced}"),
    ]
    if config.verifier is not None:
        rows.append(("target", config.verifier.name_or_path))
    scales = _scales(config)
    return [*rows, ("scales", scales)] if scales else rows


def _target_rows(config: TargetConfig) -> list[tuple[str, str]]:
    tied = ", head tied to the embedding" if config.tie_word_embeddings else ""
    return [
        ("model", config.model_type),
        ("rope", _rope(config)),
        ("sizes", _sizes(config)),
        ("vocabulary", f"{config.vocab_size} ids{tied}"),
    ]


def _sizes(config: DraftConfig | TargetConfig) -> str:
    return (
        f"{config.num_layers} layers, hidden {config.hidden_size}, intermediate {config.intermediate_size}, "
        f"heads {config.num_heads}/{config.num_kv_heads} of {config.head_dim}"
    )


def _rope(config: DraftConfig | TargetConfig) -> str:
    params = "".join(f", {key} {value}" for key, value in config.rope.params.items())
    reach = f"up to {config.max_position_embeddings} positions"
    return f"{config.rope.kind}, theta {_number(config.rope.theta)}{params}, {reach}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)


def _scales(config: DraftConfig) -> str:
    values = {
        "input_embedding_scale": None if config.input_embedding_scale == 1.0 else config.input_embedding_scale,
        "output_multiplier": None if config.output_multiplier == 1.0 else config.output_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    return ", ".join(f"{key} {value:g}" for key, value in values.items() if value is not None)


def _weights(found: Description) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.dtypes.items())
    return f"{found.num_parameters:,} parameters, {found.num_bytes:,} bytes, {kinds}"


def _files(found: Description) -> str:
    return ", ".join(file.name for file in found.checkpoint.weight_files)


def _print_difference(difference: Difference) -> None:
    if difference.is_empty:
        console.result(f"no difference: every field, key and {difference.num_equal} tensors are equal")
        return
    for label, pairs in (("field", difference.fields), ("key", difference.carried), ("tensor", difference.reshaped)):
        for name, (one, other) in pairs.items():
            console.result(f"{label:7} {name}: {_show(one)} -> {_show(other)}")
    for name in difference.only_first:
        console.result(f"tensor  {name}: only in the first")
    for name in difference.only_second:
        console.result(f"tensor  {name}: only in the second")
    for name in difference.rewritten:
        console.result(f"tensor  {name}: other bytes")
    console.result(f"{difference.num_equal} tensors are equal")


def _difference_document(first: Description, second: Description, difference: Difference) -> dict[str, Any]:
    return {
        "first": str(first.path),
        "second": str(second.path),
        "dialects": [first.dialect, second.dialect],
        "is_equal": difference.is_empty,
        "fields": difference.fields,
        "carried": difference.carried,
        "tensors": {
            "only_first": list(difference.only_first),
            "only_second": list(difference.only_second),
            "reshaped": difference.reshaped,
            "rewritten": list(difference.rewritten),
            "num_equal": difference.num_equal,
        },
    }


def _kind(found: Description) -> str:
    return "draft" if isinstance(found.config, DraftConfig) else "target"


def _show(value: Any) -> str:
    return "unset" if value is None else str(value)
