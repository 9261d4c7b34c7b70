"""llama.cpp: its causality, its rules, and the commands that convert a pair to GGUF and serve it.

llama.cpp has build numbers instead of releases. The rules follow its converter and loader of August 2026.
"""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.engines.engine_reading import (
    EngineReading,
    check_all_tensors,
    check_architecture,
    check_captured,
    check_mask,
    resolve_auto,
)
from dflash_cli.engines.serving_engine import (
    ENGINES,
    Habit,
    Release,
    ServeCommand,
    ServedPair,
    ServingEngine,
    file_name_of,
    problem_of_causality,
    words_of,
)
from dflash_cli.engines.several_engines import FIX_VLLM
from dflash_cli.formats.decoder_body import LAYER_KINDS
from dflash_cli.formats.dialect import Format, named_architectures
from dflash_cli.formats.dspark import DSparkSpeculators
from dflash_cli.formats.fields import LOGIT_SCALE, look_up
from dflash_cli.formats.gguf import Gguf
from dflash_cli.formats.gguf_fields import ARCHITECTURE_KEY, CAUSAL, TOKENS
from dflash_cli.formats.gguf_relatives import GgufRelative
from dflash_cli.formats.native import Native
from dflash_cli.formats.stated import MAX_LAYERS
from dflash_cli.rules.rule import Outcome, Problem, check
from dflash_cli.rules.shapes import stated_scales
from dflash_cli.rules.subject import BODY_SIZES, Subject
from dflash_runtime.checkpoint.layout import SINKS
from dflash_runtime.checkpoint.stored.gguf_files import find_gguf
from dflash_runtime.checkpoint.targets.hf_config import SLIDING
from dflash_runtime.errors import MISSING
from dflash_runtime.json_values import as_object

NAME = "llama.cpp"
check_llama_cpp = partial(check, engines=(NAME,))
CONVERTER = "ggml-org/llama.cpp conversion/qwen.py, src/models/dflash.cpp"


@ENGINES.register(NAME)
class LlamaCpp(ServingEngine):
    """llama.cpp. Its converter reads native drafts."""

    name: ClassVar[str] = NAME
    also: ClassVar[tuple[str, ...]] = ("llama-server", "ggml", "gguf")
    reads: ClassVar[tuple[type[Format], ...]] = (Native, DSparkSpeculators, Gguf)
    serves_as_is: ClassVar[frozenset[str]] = frozenset({"gguf"})
    follows_reference: ClassVar[bool] = True
    takes_other_widths: ClassVar[bool] = False
    finds_by_architecture: ClassVar[bool] = True
    models: ClassVar[Mapping[str, Release]] = {"DFlash2DraftModel": (), "Qwen3DSparkModel": ()}
    """Source: conversion/qwen.py registers them beside DFlashDraftModel (ggml-org/llama.cpp#27342, #25173)."""
    habits: ClassVar[Mapping[Habit, Outcome]] = {
        "model-prefix": "stops",
        "extra-tensors": "stops",
        "other-prefix": "stops",
        "encoder-names": "stops",
        "fused-projections": "stops",
        "interleaved-rope": "drops",
        "interleaved-rope-by-its-name": "drops",
        "gemma-norms": "drops",
        "use-swa": "drops",
        "mask-pickle": "drops",
        "mask-safetensors": "drops",
        "nested-style": "drops",
    }
    """Source: conversion/qwen.py, which puts `model.` before layers and the last norm, and finds the rest by name."""

    def read_values(self, subject: Subject) -> EngineReading | None:
        """The metadata that the converter writes, as the loader reads it. Numbers must be integers that GGUF holds."""
        config = subject.config
        if isinstance(subject.format, Gguf):
            return _gguf_values(subject)
        try:
            found = resolve_auto(config)
        except EngineStops:  # the converter then reads the file itself
            found = dict(config)
        if found is None:
            return None
        check_architecture({"architectures": named_architectures(config)[:1]}, Native.architecture)
        nested = found.get("dflash_config", {})
        if not isinstance(nested, dict):
            raise EngineStops("dflash_config", f"found {nested!r}, expected an object")
        taps, mask = nested.get("target_layer_ids"), _count("mask_token_id", nested.get("mask_token_id"))
        if not isinstance(taps, list) or not taps or not all(isinstance(tap, int) for tap in taps):
            raise EngineStops("target_layer_ids", f"found {taps!r}, expected a list of integers beside the mask token")
        rope = as_object(found.get("rope_parameters"))
        block = _count("block_size", found.get("block_size", 16))
        windows = _windows(found)
        check_all_tensors(found, len(taps), subject)
        check_captured(taps, found["hidden_size"], subject)
        check_mask(mask, subject)
        return EngineReading(
            windows=windows,
            causal=(any(self.causality(subject)),) * len(windows),
            taps=tuple(taps),
            mask_token_id=mask,
            rope=rope if "rope_theta" in rope else {},
            eps=found.get("rms_norm_eps", 1e-6),
            block_size=block if "block_size" in config else None,
        )

    def ignores_extra_tensor(self, name: str) -> bool:
        """It computes attention sinks if their tensors are there, whatever the config says."""
        return name.endswith(SINKS)

    def causality(self, subject: Subject) -> tuple[bool, ...]:
        """One flag for all layers, false if none is stated."""
        if isinstance(subject.format, Gguf):
            return (look_up(subject.config, CAUSAL) is True,) * len(subject.stated.layer_types)
        top, nested = subject.config.get("is_causal"), as_object(subject.config.get("dflash_config")).get("causal")
        return (top is True or (top is None and nested is True),) * len(subject.stated.layer_types)

    def serves_kind(self, dialect: Format, config: Mapping[str, Any]) -> bool:
        """It also converts speculators files of DSpark, and loads GGUF. Source: ggml-org/llama.cpp#26275, #27342."""
        return isinstance(dialect, DSparkSpeculators | GgufRelative) or super().serves_kind(dialect, config)

    def served_layout(self, subject: Subject) -> bool | None:
        """The layout of a speculators file of DSpark; a missing key means fill-in. Native files are not modelled."""
        if not isinstance(subject.format, DSparkSpeculators):
            return None
        return bool(subject.config.get("sample_from_anchor", False))

    def serve_command(self, pair: ServedPair) -> ServeCommand:
        """Two conversions to GGUF, then the server. The converter takes directories, and reads the target's tokenizer.

        A draft in GGUF is not converted. --spec-draft-n-max is the number of draft tokens.
        """
        stored, target = find_gguf(Path(pair.draft)), _gguf(pair.target)
        draft = _gguf(pair.draft) if stored is None else str(stored)
        convert = ["python3", "convert_hf_to_gguf.py"]
        of_draft = [*convert, pair.draft, "--outtype", "bf16", "--target-model-dir", pair.target, "--outfile", draft]
        serve = ["llama-server", "-m", target, "-md", draft, "--spec-type", f"draft-{pair.method}"]
        serve += words_of({"--spec-draft-n-max": pair.num_draft_tokens, "-c": pair.context_limit})
        of_target = [*convert, pair.target, "--outtype", "bf16", "--outfile", target]
        commands = [of_target, of_draft, serve] if stored is None else [of_target, serve]
        return ServeCommand(tuple(map(shlex.join, commands)), pair.num_draft_tokens)


def _gguf_values(subject: Subject) -> EngineReading | None:
    """The metadata of a GGUF file as src/models/dflash.cpp reads it. None if the file's dialect does not read it.

    Without a key the block has 16 rows, rope has the theta 10000, and all layers see the whole block.
    """
    if subject.parsed is None:
        raise EngineStops(ARCHITECTURE_KEY, "the metadata cannot be read")
    config = subject.parsed.config
    if look_up(subject.config, TOKENS) is MISSING:
        raise EngineStops(TOKENS, "no tokenizer")
    sizes = {key: getattr(config, name) for key, name in BODY_SIZES.items()}
    check_all_tensors(sizes, len(config.target_layer_ids), subject)
    check_captured([*config.target_layer_ids], config.hidden_size, subject)
    check_mask(config.mask_token_id, subject)
    return EngineReading(
        windows=config.windows,
        causal=config.causal,
        taps=config.target_layer_ids,
        mask_token_id=config.mask_token_id,
        rope={"rope_theta": config.rope.theta, "rope_type": config.rope.kind, **config.rope.params},
        eps=config.rms_norm_eps,
        block_size=config.block_size,
    )


def _count(key: str, value: Any) -> int:
    """A number as GGUF holds it."""
    if not isinstance(value, int) or value < 0:
        raise EngineStops(key, f"found {value!r}, expected an integer of 0 or more")
    return value


def _windows(found: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer. The converter writes windows only if three keys together ask for them."""
    count = _count("num_hidden_layers", found.get("num_hidden_layers"))
    if count > MAX_LAYERS:
        raise EngineStops("num_hidden_layers", f"found {count}, expected at most {MAX_LAYERS}")
    window, kinds = found.get("sliding_window"), found.get("layer_types")
    if not (found.get("use_sliding_window") and window and kinds):
        return (None,) * count
    if not isinstance(kinds, list):
        raise EngineStops("layer_types", f"found {kinds!r}, expected {count} entries")
    size = _count("sliding_window", window)
    listed = tuple(size if kind == SLIDING else None for kind in kinds[:count])
    return listed + (None,) * (count - len(listed))  # src/models/dflash.cpp:86 checks no length; the rest is full


@check_llama_cpp("S15", effect="llama.cpp does not know the bias and stops", fix=FIX_VLLM, source=CONVERTER)
def llama_has_no_bias(subject: Subject) -> Iterator[Problem]:
    """attention_bias is false, because llama.cpp creates no bias tensors for DFlash."""
    if subject.stated.body.get("attention_bias") is True:
        yield Problem(subject.body_at("attention_bias"), "true, expected false")


@check_llama_cpp(
    "S25",
    effect="llama.cpp has one causality flag for all layers",
    fix=FIX_VLLM,
    source=CONVERTER,
    outcome="drops",
)
def llama_serves_one_causality(subject: Subject) -> Iterator[Problem]:
    """All layers share one causality, and it is stated."""
    problem = problem_of_causality(NAME, subject)
    if problem is not None:
        is_mixed = set(subject.stated.layer_types) == set(LAYER_KINDS)
        yield replace(problem, location=subject.body_at("layer_types")) if is_mixed else problem


@check_llama_cpp(
    "S26",
    "warning",
    effect="converters of July 2026 and earlier always write a block size of 16",
    fix="dflash validate {draft} --engine llama.cpp --fix-out {out}",
    source=CONVERTER,
)
def llama_finds_the_block(subject: Subject) -> Iterator[Problem]:
    """block_size is at the top level, where llama.cpp's converter reads it."""
    is_nested = subject.config.get("block_size") is None and subject.stated.block_size not in (None, 16)
    is_older = subject.format.family == Format.family  # those converters know no other family
    if isinstance(subject.format, Native) and is_older and is_nested:
        message = f"missing at the top level, {subject.stated.block_size} in dflash_config"
        yield Problem(subject.expected_at("block_size"), message)


@check_llama_cpp(
    "S27",
    effect="llama.cpp ignores the scale, so embeddings or logits have another scale than in training",
    fix="dflash eval-acceptance {draft} --target {target} # applies it; llama.cpp and vLLM do not",
    source="ggml-org/llama.cpp src/models/dflash.cpp",
    outcome="drops",
)
def llama_applies_no_scale(subject: Subject) -> Iterator[Problem]:
    """input_embedding_scale and logit_scale are 1 or absent, because llama.cpp does not apply them."""
    yield from stated_scales(subject, ("input_embedding_scale", LOGIT_SCALE))


def _gguf(reference: str) -> str:
    return f"{file_name_of(reference)}.gguf"
