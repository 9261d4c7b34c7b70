"""Whether a target runs here, and how: one answer for every command. Needs no torch.

Commands that run a target pass the readers that load it. Other commands use a record of transformers' config classes,
and import neither torch nor transformers.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dflash_runtime.checkpoint.canonical_names import find_quantization, refuse_packed
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.quantised.fp8_format import read_fp8_format, refuse_packed_unless_fp8
from dflash_runtime.checkpoint.quantised.stated_quantization import check_statements, stated_quantization
from dflash_runtime.checkpoint.quantised.target_quantization import (
    Quantization,
    check_mxfp4,
    native_quantization,
    read_quantization,
)
from dflash_runtime.checkpoint.stored.adapters import ADAPTER
from dflash_runtime.checkpoint.targets.gemma4_config import GEMMA4, read_gemma4_config
from dflash_runtime.checkpoint.targets.gpt_oss_config import read_gpt_oss_config
from dflash_runtime.checkpoint.targets.hf_config import not_run, refuse_other_layers
from dflash_runtime.checkpoint.targets.hosted_config import read_recorded
from dflash_runtime.checkpoint.targets.hosted_refusals import A_FAMILY, refuse_cache, refuse_pages
from dflash_runtime.checkpoint.targets.hybrid_config import HYBRIDS, read_hybrid_config
from dflash_runtime.checkpoint.targets.recorded_types import recorded_types
from dflash_runtime.errors import CheckpointError, UnsupportedError
from dflash_runtime.notices import Notice
from dflash_runtime.registry import RegisteringFile, registering_files
from dflash_runtime.target_config import TargetConfig

if TYPE_CHECKING:
    from dflash_runtime.checkpoint.targets.decoder_values import DecoderConfig

TargetRuntime = Literal["native", "transformers", "transformers-cache"]
"""The code that runs a target: a family of dflash_runtime/models/families, or transformers, over our pages or with its
own cache."""

WORDS: dict[TargetRuntime, str] = {
    "native": "natively",
    "transformers": "by transformers over our pages, in CUDA graphs on a GPU",
    "transformers-cache": "by transformers with its own cache, more slowly than over pages",
}

UNCAPTURED = "slowly, by transformers over our pages, without CUDA graphs: its code reads values on the host"
"""The words for a target over our pages with such code."""

FAMILIES = "dflash_runtime.models.families"
"""The package of native families. Importing it imports no family."""

TRIAL_WORDS = {
    "target-layers-not-found": "its code keeps its decoder layers where a draft cannot tap them",
    "target-cache-differs": "its hidden states with a cache differ from those without",
    "target-head": "its head does more to its logits than scale and cap them",
}
"""Refusals after a trial that depend on a model's code, not on its sizes -> the reason in words."""

CONFIG_READERS: Mapping[str, Callable[[Mapping[str, Any], Path], TargetConfig]] = {
    **dict.fromkeys(HYBRIDS, read_hybrid_config),
    "gpt_oss": read_gpt_oss_config,
    **dict.fromkeys(GEMMA4, read_gemma4_config),
}
"""Model type of a native family -> the reader of its config, unless `hf_config.read_target_config` reads it."""

KEPT_PACKED: Mapping[str, Quantization] = {
    "gpt_oss": Quantization("mxfp4", (), is_unpacked=False, num_bits=4),
}
"""Model type of a native family -> the quantised weights that it multiplies as they are."""

WITHOUT_FP8 = frozenset({"gpt_oss", *GEMMA4})
"""Model types of native families that do not multiply FP8."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunsHere:
    """The answer for one target.

    runtime        the code that runs it; None if it is refused
    host_read      the operation that reads a value on the host in a step over our pages, which rules out CUDA graphs;
                   None if the trial of its type found none
    quantization   how its weights are quantised; None for plain weights
    refusal        why nothing here runs it; None if something does
    """

    runtime: TargetRuntime | None
    quantization: Quantization | None = None
    refusal: UnsupportedError | CheckpointError | None = None
    host_read: str | None = None

    @property
    def is_fast(self) -> bool:
        """Whether native code runs it."""
        return self.runtime == "native"

    @property
    def is_captured(self) -> bool:
        """Whether transformers runs it over our pages, in CUDA graphs on a GPU."""
        return self.runtime == "transformers" and self.host_read is None

    @property
    def words(self) -> str:
        """The answer in words, such as `natively; weights fp8`."""
        if self.runtime is None:
            return f"refused: {self.reason}"
        packed = "" if self.quantization is None else f"; weights {self.quantization.label}"
        way = WORDS[self.runtime] if self.host_read is None else f"{UNCAPTURED} ({self.host_read})"
        return way + packed

    @property
    def reason(self) -> str:
        """The reason of a refusal, without the file and the model type; empty if the target runs."""
        if self.refusal is None:
            return ""
        text = self.refusal.message.removeprefix(f"{self.refusal.path}: ")
        return re.sub(r"^this runtime does not run \S+ targets: |, which this runtime does not run", "", text)


@dataclass(frozen=True, slots=True)
class RunsHereEntry:
    """How a target runs here."""

    runtime: Annotated[TargetRuntime | None, "null if it is refused"]
    words: str
    refused_by: Annotated[str | None, "id of the refusal"]

    @classmethod
    def of(cls, answer: RunsHere) -> "RunsHereEntry":
        """The answer as a part of documents."""
        return cls(answer.runtime, answer.words, None if answer.refusal is None else answer.refusal.id)


def how_it_runs(
    source: TargetSource,
    wanted: str = "auto",
    *,
    refuse_native: Callable[[TargetSource], object] | None = None,
    read_decoder: "Callable[[TargetSource], DecoderConfig]" = read_recorded,
    trials: Mapping[str, str] | None = None,
) -> RunsHere:
    """Return how a target runs, from its config and headers, with the code that is `wanted`.

    `auto` chooses native code for every target of a native family, and `transformers` chooses our pages if they can
    serve the target. `refuse_native` raises if native code does not run it, and `read_decoder` reads its decoder's
    config as transformers does. `trials` are the ends of trials by model type, by default the recorded ones. A config
    that transformers does not accept, and a trial after loading, may still refuse the target.
    """
    has_headers = _has_headers(source)
    try:
        if wanted in ("auto", "native"):
            try:
                (refuse_native or native_config)(source)
                return RunsHere("native", kept_packed(source))
            except UnsupportedError as error:
                if wanted == "native":
                    error.hint = f"--target-runtime auto may run it, slowly, or {A_FAMILY}; {error.hint}"
                    raise
        text, path = read_decoder(source), source.checkpoint.config_path
        runtime: TargetRuntime = "transformers-cache"
        tried = _find(recorded_trials() if trials is None else trials, source, text.model_type)
        if wanted != "transformers-cache" and _fits_pages(text, path) and tried != runtime:
            runtime = "transformers"
        else:
            refuse_cache(text, path)
        if tried in TRIAL_WORDS:
            raise not_run(text.model_type, TRIAL_WORDS[tried], id=tried, path=path)
        _refuse_adapter(source)
        host_read = _find(recorded_host_reads(), source, text.model_type) if runtime == "transformers" else None
        return RunsHere(runtime, read_quantization(source, has_headers=has_headers), host_read=host_read)
    except (UnsupportedError, CheckpointError) as error:
        return RunsHere(None, refusal=error)


@cache
def _record() -> Mapping[str, Mapping[str, str]]:
    """Return the tables of `scripts/transformers_trials.py`; empty ones if another transformers is installed."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("transformers_trials.json").read_text("utf-8"))
    return {name: found[name] if release_note() is None else {} for name in ("trials", "host_reads")}


def recorded_trials() -> Mapping[str, str]:
    """Return model type -> the end of its trial, where its config does not show it."""
    return _record()["trials"]


def recorded_host_reads() -> Mapping[str, str]:
    """Return model type -> the operation by which its code reads a value on the host, over our pages."""
    return _record()["host_reads"]


def _find(table: Mapping[str, str], source: TargetSource, decoder_type: str) -> str | None:
    """Return a model type's row of a table of trials. A wrapper was tried with its usual decoder."""
    kind = str(source.checkpoint.config.get("model_type"))
    is_usual = recorded_types()["decoders"].get(kind) == decoder_type
    return table.get(kind if is_usual else decoder_type)


def without_native_family(source: TargetSource, families: frozenset[str]) -> UnsupportedError:
    """Return the refusal of a model type without a native family."""
    not_known = f"; not known to it: {', '.join(source.facts.not_known)}" if source.facts.not_known else ""
    reason = f"it runs {', '.join(sorted(families))}{not_known}"
    kind, path = source.facts.model_type, source.checkpoint.config_path
    return not_run(kind, reason, id="target-without-native-family", path=path)


def family_files() -> list[RegisteringFile]:
    """Return the files of `FAMILIES` that register a native family."""
    return registering_files(FAMILIES, "TARGETS")


def native_families() -> dict[str, bool]:
    """Return the model types of native families, and whether a family reads configs itself."""
    return {name: "def read_config(" in file.text for file in family_files() for name in file.names}


def release_note() -> Notice | None:
    """Return a note if the installed release of transformers is another than the recorded one."""
    recorded = recorded_types()["transformers"]
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        return None
    if installed == recorded:
        return None
    text = f"how targets run is recorded for transformers {recorded}, and {installed} is installed"
    return Notice(text, id="other-transformers")


def native_config(source: TargetSource) -> TargetConfig | None:
    """Return the config of a target as its native family reads it; None if only the family's file can read it.

    Raises:
        UnsupportedError: no native family runs the target.
        CheckpointError: the config is malformed.
    """
    families = native_families()
    kind = source.facts.model_type
    if kind not in families:
        raise without_native_family(source, frozenset(families))
    checkpoint, read_config = source.checkpoint, CONFIG_READERS.get(kind)
    found = None
    if read_config is not None:
        found = read_config(checkpoint.config, checkpoint.config_path)
    elif not families[kind]:
        found = source.config
    if found is not None:
        refuse_other_layers(found, checkpoint.config_path)
    refuse_quantised(source, found)
    return found


def refuse_quantised(source: TargetSource, config: TargetConfig | None) -> None:
    """Refuse quantised weights, unless the native family of the target multiplies them as they are.

    `config` is the target's config as its family reads it, if it is known.

    Raises:
        UnsupportedError: the weights are quantised.
        CheckpointError: the config contradicts itself or the weights, or a weight in FP8 lacks its scales.
    """
    checkpoint, has_headers = source.checkpoint, _has_headers(source)
    check_statements(checkpoint)
    if source.facts.model_type not in WITHOUT_FP8:
        refuse_packed_unless_fp8(checkpoint, has_headers=has_headers)
        _refuse_cut_expert(source, config)
    elif kept_packed(source) is None:
        refuse_packed(checkpoint.path, find_quantization(checkpoint, has_headers=has_headers))
    elif has_headers:
        check_mxfp4(checkpoint)


def _refuse_cut_expert(source: TargetSource, config: TargetConfig | None) -> None:
    """Refuse a shared expert in FP8 that is computed as several experts, if they would have other scales of rows.

    Raises:
        UnsupportedError: there is one.
    """
    form, experts = read_fp8_format(source.checkpoint), None if config is None else config.experts
    if form is None or experts is None or (experts.shared_size or 0) <= experts.intermediate_size:
        return
    has_own = form.block is None or experts.intermediate_size % form.block[1] != 0
    if has_own and (form.block is not None or form.activations == "dynamic"):
        text = (
            f"a shared expert in FP8 of width {experts.shared_size}, which is computed in parts of "
            f"{experts.intermediate_size} with other scales"
        )
        raise UnsupportedError(text, id="fp8-shared-expert-cut", path=source.checkpoint.path)


def kept_packed(source: TargetSource) -> Quantization | None:
    """Return the quantization of weights that a native family multiplies as they are."""
    kind = source.facts.model_type
    if kind not in WITHOUT_FP8:
        return native_quantization(source.checkpoint)
    kept, method = KEPT_PACKED.get(kind), stated_quantization(source.checkpoint).get("quant_method")
    return kept if kept is not None and kept.method == method else None


def _fits_pages(text: "DecoderConfig", path: Path) -> bool:
    try:
        refuse_pages(text, path)
    except UnsupportedError as error:
        logger.info("not over pages: %s", error.message)
        return False
    return True


def _refuse_adapter(source: TargetSource) -> None:
    """Refuse an adapter, which names another model.

    Raises:
        UnsupportedError: there is one.
    """
    if ADAPTER in source.checkpoint.file_names:
        why, path = f"an adapter ({ADAPTER}) beside the weights", source.checkpoint.config_path
        raise not_run(source.facts.model_type, why, id="target-adapter", path=path)


def _has_headers(source: TargetSource) -> bool:
    """Whether a target's headers can be read. It may be a config alone."""
    try:
        return bool(source.checkpoint.tensors)
    except CheckpointError:
        return False
