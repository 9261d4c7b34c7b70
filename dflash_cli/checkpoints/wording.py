"""Describe checkpoints and their differences in lines for a terminal."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_cli.checkpoints.comparison import Difference
from dflash_cli.checkpoints.description import Description, KindFacts, describe_layers
from dflash_cli.checkpoints.target_words import experts_in_words, layers_in_words, rope_in_words, ropes_in_words
from dflash_cli.formats.fields import scales_in_use
from dflash_cli.formats.unserved import unserved_in_words
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.target_config import TargetConfig, TargetFacts

MOST_NAMED = 10
"""The most tensors of a group that have a line each. A larger group is one line, unless `with_tensors`."""

FIELD_NAMES = {
    "num_layers": "layers",
    "num_heads": "attention heads",
    "num_kv_heads": "KV heads",
    "target_layer_ids": "tapped layers of the target",
    "num_target_layers": "layers of the target",
    "target_hidden_size": "hidden size of the target",
    "verifier name_or_path": "name of the target",
    "verifier architectures": "architecture of the target",
    "vocab_size": "vocabulary",
    "draft_vocab_size": "ids the draft can propose",
}
"""Field -> its name in words. Other fields are named by their own words."""

DESCRIBED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rms_norm_eps", "max_position_embeddings", "block_size", "layer_ids", "model_type", "layer_types",
    "attention_bias",
)  # fmt: skip
"""The ends of keys of other kinds of drafts that have words of their own, or that every decoder has."""

BY_LAYER = ("num_layers", "windows", "layer_kinds", "chunk_size")
"""Fields of a target that `layers_in_words` describes."""


def description_lines(found: Description, *, with_tensors: bool = False) -> Iterator[str]:
    """The description of a checkpoint, one labelled line for each aspect."""
    rows = _rows(found)
    title = f"{found.title} ({found.evidence})" if found.evidence else found.title
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.dtypes.items())
    weights = f"{found.num_parameters:,} parameters, {found.num_bytes:,} bytes, {kinds}"
    files = ", ".join(file.name for file in found.checkpoint.weight_files)
    rows = [("kind", title), *rows, ("weights", weights), ("files", files)]
    if found.runs_here is not None:
        rows.append(("runs here", found.runs_here.words))
    if found.unserved:
        rows.insert(1, ("not served", unserved_in_words(found.unserved)))
    if found.borrowed:
        text = "copies of the target's weights, or tensors that only training needs"
        rows.append(("not loaded", f"{', '.join(found.borrowed)}: {text}"))
    if found.carried:
        rows.append(
            (
                "other keys",
                f"{', '.join(sorted(found.carried))}: not used here; dflash convert copies them where it can",
            )
        )
    if found.metadata:
        rows.append(("metadata", f"{', '.join(sorted(found.metadata))}: in the headers, not used"))
    for label, text in rows:
        yield f"{label:11} {text}"
    if with_tensors:
        for info in found.checkpoint.tensors.values():
            yield f"  {info.name}  {info.dtype}  {list(info.shape)}"


def difference_lines(difference: Difference, *, with_tensors: bool = False) -> Iterator[str]:
    """The differences between two checkpoints, one line each."""
    not_compared = f"{difference.num_not_compared} tensors have the same type and shape; values were not compared"
    if difference.is_empty:
        tensors = "" if difference.num_not_compared else f" and all {difference.num_equal} tensors"
        yield f"no difference: all fields{' and' if not tensors else ','} all keys{tensors} are equal"
        if difference.num_not_compared:
            yield not_compared
        return
    yield from _field_lines(difference)
    for key, (one, other) in difference.carried.items():
        yield _contrast(key, _value(one), _value(other))
    reshaped = {name: _contrast(name, one, other) for name, (one, other) in difference.reshaped.items()}
    groups: list[tuple[str, Mapping[str, str]]] = [
        ("only in the first", {name: f"{name}: only in the first" for name in difference.only_first}),
        ("only in the second", {name: f"{name}: only in the second" for name in difference.only_second}),
        ("of different type or shape", reshaped),
        ("with different values", {name: f"{name}: different values" for name in difference.rewritten}),
    ]
    for title, lines in groups:
        if len(lines) > MOST_NAMED and not with_tensors:
            yield f"{len(lines)} tensors {title}: {', '.join(list(lines)[:3])}, ... (--tensors names them all)"
        else:
            yield from (f"tensor {line}" for line in lines.values())
    yield not_compared if difference.num_not_compared else f"{difference.num_equal} tensors are equal"


def _rows(found: Description) -> list[tuple[str, str]]:
    config = found.config
    if isinstance(config, KindFacts):
        return _kind_rows(config)
    return _draft_rows(config, found) if isinstance(config, DraftConfig) else _target_rows(config)


def _kind_rows(config: KindFacts) -> list[tuple[str, str]]:
    """The head, the sizes and the servers of a draft of another kind."""
    found = config.sizes
    taps = found.get("taps")
    sizes = (
        f"{found.get('layers', '?')} layers, hidden size {found.get('hidden', '?')}, intermediate size "
        f"{found.get('inner', '?')}, {found.get('heads', '?')} attention and {found.get('kv_heads', '?')} KV heads of "
        f"{found.get('head_dim', '?')}"
    )
    own = [f"{key} {_value(value)}" for key, value in config.settings.items() if not key.endswith(DESCRIBED)]
    rows = [
        ("head", config.head),
        ("served", config.served_by),
        ("block", f"{found['block']} tokens" if "block" in found else ""),
        ("tapped", f"layers {_value(taps)} of the target" if isinstance(taps, list) else ""),
        ("sizes", sizes),
        ("vocabulary", f"{found.get('vocab', '?')} ids"),
        ("settings", ", ".join(own)),
    ]
    return [(label, text) for label, text in rows if text]


def _draft_rows(config: DraftConfig, found: Description) -> list[tuple[str, str]]:
    depth = f" of the target's {config.num_target_layers}" if config.num_target_layers is not None else " of the target"
    taps = ", ".join(map(str, config.target_layer_ids))
    reduced = f"; the draft proposes {config.draft_vocab_size} of them" if config.has_reduced_vocab else ""
    rows = [
        ("block", _block(config, has_unknown_layout=found.has_unknown_layout)),
        ("tapped", f"layers {taps}{depth} (counted from 0); their outputs feed the draft"),
        ("mask", f"token id {config.mask_token_id}"),
        ("attention", describe_layers(config)),
        ("rope", f"{rope_in_words(config.rope)}, {_reach(config)}"),
        ("sizes", f"{_sizes(config)}, {config.num_taps} tapped layers of width {config.feature_size}"),
        ("vocabulary", f"{config.vocab_size} ids{reduced}"),
    ]
    rows += [(label, text) for label, text in _family_rows(config) if text]
    if config.verifier is not None:
        rows.append(("target", config.verifier.name_or_path))
    scales = ", ".join(f"{key} {value:g}" for key, value in scales_in_use(config).items())
    return [*rows, ("scales", scales)] if scales else rows


def _block(config: DraftConfig, *, has_unknown_layout: bool) -> str:
    """The rows of a block, and the number of tokens that they draft."""
    size = config.block_size
    if has_unknown_layout:
        return f"{size} rows, layout not stated: anchor-first drafts {size} tokens, fill-in {size - 1}; see --layout"
    if config.sample_from_anchor:
        return f"{size} rows, anchor-first: each drafts the token after it, {size} in all"
    return f"{size} tokens: the last committed one and {config.num_draft_tokens} drafted ones"


def _family_rows(config: DraftConfig) -> list[tuple[str, str]]:
    """The parts that only some draft families have."""
    conv, selector, markov = config.convolution, config.selector, config.markov
    text = ""
    if markov is not None:
        limit = "" if markov.top_k is None else f", among the {markov.top_k} best tokens"
        text = f"{markov.head_type}, rank {markov.rank}{limit}"
    reads = " from hidden state and token" if config.confidence_reads_token and markov else " from the hidden state"
    return [
        ("convolution", "" if conv is None else f"{conv.kernel_size} taps, groups of {conv.group_size} columns"),
        ("selector", "" if selector is None else f"rank {selector.rank}, {selector.top_k} candidates per position"),
        ("Markov head", text),
        ("confidence", f"predicted{reads}" if config.has_confidence else ""),
    ]


def _target_rows(config: TargetFacts) -> list[tuple[str, str]]:
    tied = ", head tied to the embedding" if config.tie_word_embeddings else ""
    scaled = f", embedding times {config.embedding_scale:.4g}" if config.embedding_scale != 1 else ""
    nested = f", in {config.nested_in} of a multimodal model" if config.nested_in else ""
    rows = [
        ("model", f"{config.model_type}{nested}"),
        ("layers", layers_in_words(config)),
        ("rope", f"{'; '.join(ropes_in_words(config)) or 'not stated'}, {_reach(config)}"),
        ("experts", experts_in_words(config)),
        ("sizes", _sizes(config)),
        ("vocabulary", f"{config.vocab_size} ids{tied}{scaled}"),
        ("quantised", config.quantization or ""),
    ]
    return [(label, text) for label, text in rows if text]


def _sizes(config: DraftConfig | TargetFacts) -> str:
    inner = f"intermediate size {config.intermediate_size}" if isinstance(config, DraftConfig | TargetConfig) else ""
    heads = ""
    if config.num_heads is not None:
        heads = f"{config.num_heads} attention"
        heads += f" and {config.num_kv_heads} KV heads" if config.num_kv_heads is not None else " heads"
        heads += f" of {config.head_dim}" if config.head_dim is not None else ""
    parts = (f"{config.num_layers} layers, hidden size {config.hidden_size}", inner, heads)
    return ", ".join(part for part in parts if part)


def _reach(config: DraftConfig | TargetFacts) -> str:
    return f"up to {config.max_position_embeddings or 'an unstated number of'} positions"


def _field_lines(difference: Difference) -> Iterator[str]:
    """Yield a line for each differing field, and for each differing entry of a field that holds an object."""
    fields = dict(difference.fields)
    first, second = difference.first.config, difference.second.config
    if isinstance(first, DraftConfig) and isinstance(second, DraftConfig):
        fields = {name: pair for name, pair in fields.items() if name not in ("windows", "causal")}
        if _attention(first) != _attention(second):
            yield f"attention in the first: {describe_layers(first)}"
            yield f"attention in the second: {describe_layers(second)}"
    if isinstance(first, TargetFacts) and isinstance(second, TargetFacts):
        words = layers_in_words(first), layers_in_words(second)
        if words[0] != words[1]:
            fields = {name: pair for name, pair in fields.items() if name not in BY_LAYER}
            yield _contrast("layers", *words)
    for name, (one, other) in fields.items():
        ours, theirs = _parts(name, one), _parts(name, other)
        for part in dict.fromkeys([*ours, *theirs]):
            texts = _value(ours.get(part)), _value(theirs.get(part))
            if ours.get(part) != theirs.get(part):
                yield _contrast(FIELD_NAMES.get(part, part.replace("_", " ")), *texts)


def _attention(config: DraftConfig) -> list[tuple[int | None, bool]]:
    """Window and causality of each layer, or of one layer if all layers agree."""
    layers = list(zip(config.windows, config.causal, strict=True))
    return layers[:1] if len(set(layers)) == 1 else layers


def _parts(name: str, value: Any) -> dict[str, Any]:
    """Name -> value of a field, or of each part of an object. The key `params` is left out of names."""
    if not isinstance(value, Mapping):
        return {} if value is None else {name: value}
    parts: dict[str, Any] = {}
    for key, inner in value.items():
        parts |= _parts(name if key == "params" else f"{name} {key}", inner)
    return parts


def _contrast(label: str, one: str, other: str) -> str:
    comma = ";" if "," in one + other else ","
    return f"{label}: {one} in the first{comma} {other} in the second"


def _value(value: Any) -> str:
    """A value of a config without quotes and brackets."""
    if value is None:
        return "not stated"
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return ", ".join(map(_value, value)) or "none"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value)
