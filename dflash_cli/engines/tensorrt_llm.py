"""TensorRT-LLM's PyTorch backend: its causality, its rules, and the commands that write its settings and serve a pair.

dflash does not run TensorRT-LLM. The rules follow its code as it was read, without a release: each `source` names files
and commits. Drafts of other kinds and families are not judged, because their code was not read.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from typing import ClassVar

from dflash_cli.engines.serving_engine import (
    ENGINES,
    Habit,
    ServeCommand,
    ServedPair,
    ServingEngine,
    file_name_of,
    problem_of_causality,
    words_of,
)
from dflash_cli.engines.several_engines import FIX_VLLM
from dflash_cli.formats.dialect import Format
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.fields import LOGIT_SCALE
from dflash_cli.formats.native import Native
from dflash_cli.rules.rule import Outcome, Problem, check
from dflash_cli.rules.shapes import stated_scales
from dflash_cli.rules.subject import Subject
from dflash_runtime.checkpoint.targets.hf_config import SLIDING
from dflash_runtime.json_values import as_object

NAME = "tensorrt-llm"
check_tensorrt_llm = partial(check, engines=(NAME,))
MODEL = "NVIDIA/TensorRT-LLM tensorrt_llm/_torch/models/modeling_dflash.py, 009d8fa4"
WORKER = "NVIDIA/TensorRT-LLM tensorrt_llm/_torch/speculative/dflash.py, 00679c66"
SETTINGS = "NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/llm_args.py, 00043967"


@ENGINES.register(NAME)
class TensorrtLlm(ServingEngine):
    """TensorRT-LLM with decoding_type DFlash. It builds the draft by its model_type, and borrows embedding and head."""

    name: ClassVar[str] = NAME
    also: ClassVar[tuple[str, ...]] = ("trtllm", "trt-llm", "tensorrt")
    reads: ClassVar[tuple[type[Format], ...]] = (Native,)
    follows_reference: ClassVar[bool] = True
    takes_other_widths: ClassVar[bool] = False
    habits: ClassVar[Mapping[Habit, Outcome]] = {
        "model-prefix": "drops",
        "other-prefix": "drops",
        "encoder-names": "drops",
        "fused-projections": "drops",
        "interleaved-rope": "drops",
        "interleaved-rope-by-its-name": "drops",
        "gemma-norms": "drops",
        "nested-style": "drops",
        "unsorted-taps": "drops",
        "repeated-taps": "drops",
        "use-swa": "drops",
        "mask-pickle": "drops",
        "mask-safetensors": "drops",
    }
    """Source: `load_weights` of MODEL knows fc.weight and hidden_norm.weight by these names only, splits qkv_proj,
    and loads the other tensors partially. DFlashSpecMetadata of WORKER sorts the tapped layers. Norms and rope of
    modeling_qwen3.py at 010bb95f read none of the style keys.
    """

    def judges(self, dialect: Format) -> bool:
        """Only DFlash drafts. The code behind the decoding types for DSpark, EAGLE-3, MTP and others was not read."""
        return dialect.family == Format.family and not isinstance(dialect, Kind)

    def causality(self, subject: Subject) -> tuple[bool, ...]:
        """Sliding layers with a window are causal, all others are not. No key states it.

        Source: `_get_attention_mask_args` of MODEL; `get_layer_attention_window` of pyexecutor/config_utils.py.
        """
        config = subject.config
        has_windows = config.get("sliding_window") is not None and config.get("use_sliding_window") is not False
        return tuple(kind == SLIDING and has_windows for kind in subject.stated.layer_types)

    def serve_command(self, pair: ServedPair) -> ServeCommand:
        """A file of settings, and the server that reads it.

        max_draft_len is the number of draft tokens. The tapped layers and the mask token are stated, because the server
        reads them only from a config.json that is on the machine. Keys of draft_len_schedule are the largest batch
        sizes of ranges; early releases read them as the smallest.
        Reused KV blocks are not run through the target again, so the draft would lack their context: TensorRT-LLM's own
        test of DFlash turns reuse off. Source: SETTINGS; tests/unittest/_torch/speculative of the same repository.
        """
        speculative = {
            "decoding_type": "DFlash",
            "speculative_model": json.dumps(pair.draft),
            "max_draft_len": max((number for *_, number in pair.schedule), default=pair.num_draft_tokens),
            "target_layer_ids": list(pair.target_layer_ids) or None,
            "mask_token_id": pair.mask_token_id,
            "draft_len_schedule": "{" + ", ".join(f"{last}: {number}" for _, last, number in pair.schedule) + "}",
        }
        if not pair.schedule:
            del speculative["draft_len_schedule"]
        stated = [f"  {key}: {value}" for key, value in speculative.items() if value is not None]
        lines = ["speculative_config:", *stated, "kv_cache_config:", "  enable_block_reuse: false"]
        file = f"{file_name_of(pair.draft)}-tensorrt-llm.yaml"
        write = f"printf '%s\\n' {shlex.join(lines)} > {shlex.quote(file)}"
        serve = ["trtllm-serve", pair.target, "--config", file]
        serve += words_of({"--max_seq_len": pair.context_limit})
        return ServeCommand((write, shlex.join(serve)), pair.num_draft_tokens)


@check_tensorrt_llm(
    "S46",
    effect="TensorRT-LLM reads no key for the causality",
    fix=FIX_VLLM,
    source=MODEL,
    outcome="drops",
)
def tensorrt_serves_the_causality_of_its_windows(subject: Subject) -> Iterator[Problem]:
    """Sliding layers with a window are causal and all other layers are not, as TensorRT-LLM serves them."""
    problem = problem_of_causality(NAME, subject)
    if problem is not None:
        yield problem


@check_tensorrt_llm(
    "S47",
    effect="TensorRT-LLM ignores the scale, so embeddings or logits have another scale than in training",
    fix="dflash eval-acceptance {draft} --target {target} # applies it",
    source=WORKER,
    outcome="drops",
)
def tensorrt_applies_no_scale(subject: Subject) -> Iterator[Problem]:
    """input_embedding_scale and logit_scale are 1 or absent, because TensorRT-LLM does not apply them."""
    yield from stated_scales(subject, ("input_embedding_scale", LOGIT_SCALE))


@check_tensorrt_llm(
    "S48",
    effect="TensorRT-LLM ignores attention sinks",
    fix="dflash serve-command {draft} --target {target} --engine vllm # vLLM and SGLang compute them",
    source=MODEL,
    outcome="drops",
)
def tensorrt_has_no_sinks(subject: Subject) -> Iterator[Problem]:
    """The draft works without attention sinks, because TensorRT-LLM's attention of drafts does not compute them."""
    if subject.stated.value("has_sinks") is True:
        yield Problem(subject.at("has_sinks"), "true")


@check_tensorrt_llm(
    "S49",
    "warning",
    effect="settings without target_layer_ids then capture no layer, and the draft works without context",
    fix="dflash serve-command {draft} --target {target} --engine tensorrt-llm # states the layers",
    source=f"{SETTINGS}; {WORKER}",
)
def tensorrt_finds_the_taps(subject: Subject) -> Iterator[Problem]:
    """target_layer_ids is in dflash_config, where TensorRT-LLM looks for tapped layers that its settings lack."""
    nested = as_object(subject.config.get("dflash_config"))
    if isinstance(subject.format, Native) and nested.get("target_layer_ids") is None:
        yield Problem(subject.at("target_layer_ids"), "not in dflash_config")


@check_tensorrt_llm(
    "S50",
    "warning",
    effect="it is not known how TensorRT-LLM loads the draft, because dflash has read its code for other drafts only",
    fix="start the server, then check whether its draft is engaged: dflash probe http://localhost:8000",
    source=f"{MODEL}; modeling_qwen3.py, 010bb95f",
)
def tensorrt_code_was_read_for_the_draft(subject: Subject) -> Iterator[Problem]:
    """The draft is of model_type qwen3 and its weights are not packed, as in the code that was read."""
    model_type = subject.config.get("model_type")
    if not isinstance(subject.format, Native):
        return
    if model_type != "qwen3":
        yield Problem(subject.location("model_type"), f"found {model_type!r}, expected 'qwen3'")
    if subject.config.get("quantization_config") is not None:
        yield Problem(subject.location("quantization_config"), "packed weights")
