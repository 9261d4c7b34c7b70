"""transformers with z-lab's code (PyPI dflash 0.1.0): its releases, its causality, its rules, and its program.

z-lab's package does not include a server, so a short program runs the draft.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.engines.engine_reading import (
    EngineReading,
    causal_of,
    check_captured,
    check_mask,
    check_rope,
    check_shapes,
    real,
    resolve,
    whole,
    windows_of,
)
from dflash_cli.engines.family_reading import read_logits, read_selector, selector_parts
from dflash_cli.engines.serving_engine import (
    ENGINES,
    Habit,
    Release,
    ServeCommand,
    ServedPair,
    ServingEngine,
    repairable_causality,
)
from dflash_cli.formats.dflash2 import FAMILY
from dflash_cli.formats.dialect import Format
from dflash_cli.formats.fields import guess_taps
from dflash_cli.formats.native import Native
from dflash_cli.rules.rule import Outcome, Problem, check
from dflash_cli.rules.subject import CONFIG_FILE, Subject
from dflash_cli.rules.themes.tensors import FLOATS
from dflash_runtime.checkpoint.targets.layer_kinds import STATE_KINDS
from dflash_runtime.json_values import as_object, is_int, is_number

NAME = "transformers"
check_transformers = partial(check, engines=(NAME,))
ACTIVATIONS = frozenset(
    {
        "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
        "gelu_pytorch_tanh", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu", "relu2", "relu6",
        "sigmoid", "silu", "swish", "tanh", "xielu",
    }
)  # fmt: skip
"""Activations of transformers. Source: transformers 5.23.0 activations.py."""
ZLAB = "z-lab/dflash model.py, 0.1.0 and April 2026"


@ENGINES.register(NAME)
class Transformers(ServingEngine):
    """z-lab's package on a release of transformers."""

    name: ClassVar[str] = NAME
    also: ClassVar[tuple[str, ...]] = ("hf", "z-lab", "huggingface")
    reads: ClassVar[tuple[type[Format], ...]] = (Native,)
    read_families: ClassVar[frozenset[str]] = frozenset({"dflash", "dflash2"})
    releases: ClassVar[tuple[Release, ...]] = ((5, 23),)
    follows_reference: ClassVar[bool] = True
    takes_other_widths: ClassVar[bool] = False
    models: ClassVar[Mapping[str, Release]] = {"DFlash2DraftModel": (5, 23)}
    habits: ClassVar[Mapping[Habit, Outcome]] = {
        "other-prefix": "drops",
        "encoder-names": "drops",
        "fused-projections": "drops",
        "interleaved-rope": "drops",
        "interleaved-rope-by-its-name": "drops",
        "gemma-norms": "drops",
        "use-swa": "drops",
        "mask-pickle": "drops",
        "mask-safetensors": "drops",
        "nested-style": "drops",
    }
    """Recorded from z-lab 0.1.0 in tests/golden/engine_habits.json."""

    def read_values(self, subject: Subject) -> EngineReading | None:
        """The values of z-lab's loader and loop, which read every draft as Qwen3. Source: dflash 0.1.0 model.py."""
        config, nested = subject.config, subject.config.get("dflash_config", {})
        found = resolve(config, "qwen3")
        _check_packing(config)
        if not isinstance(nested, dict):
            raise EngineStops("dflash_config", f"found {nested!r}, expected an object")
        depth = config.get("num_target_layers")
        if not is_number(depth) and not isinstance(depth, bool):
            raise EngineStops("num_target_layers", "expected a number at the top level, from which taps are guessed")
        if found["hidden_act"] not in ACTIVATIONS:
            raise EngineStops("hidden_act", f"found {found['hidden_act']!r}, which transformers does not know")
        stated = {**config, **nested}
        guess = guess_taps(int(depth), found["num_hidden_layers"])
        taps, mask = stated.get("target_layer_ids", guess), stated.get("mask_token_id")
        if not isinstance(taps, list) or not taps or not all(map(is_int, taps)):
            raise EngineStops("target_layer_ids", f"found {taps!r}, expected a list of integers")
        if not isinstance(mask, int | float):
            raise EngineStops("mask_token_id", f"found {mask!r}, expected a number")
        own = read_selector(stated) if subject.format.family == FAMILY else {}
        check_shapes(found, len(taps), subject, **(selector_parts(own, found) if own else {}))
        check_rope(found["rope_parameters"])
        check_captured(taps, found["hidden_size"], subject)
        check_mask(mask, subject)
        scale = real("input_embedding_scale", stated.get("input_embedding_scale", 1.0))
        return EngineReading(
            windows=windows_of(found),
            causal=causal_of(config.get("is_causal"), found),
            taps=tuple(taps),
            mask_token_id=mask,
            rope=found["rope_parameters"],
            eps=found["rms_norm_eps"],
            block_size=whole("block_size", stated.get("block_size", 16)),
            packed=_misread(subject),
            own={**own, "input_embedding_scale": scale} if own else {},
            **read_logits(stated),
        )

    def loads_without_parts(self, dialect: Format, config: Mapping[str, Any]) -> bool:
        """z-lab's package loads a file under any other name as DFlash. Source: 0.1.0 benchmark.py."""
        return dialect.family == FAMILY

    def serve_command(self, pair: ServedPair) -> ServeCommand:
        """A program. It does not call the script of z-lab's package, which is also named dflash."""
        model = pair.architecture or Native.architecture
        lines = (
            "# pip install 'dflash[local]' in a new environment: this is z-lab's package",
            f"from dflash.model import {model}, dflash_generate",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f"target = AutoModelForCausalLM.from_pretrained({pair.target!r}, dtype='auto', device_map='auto')",
            f"tokenizer = AutoTokenizer.from_pretrained({pair.target!r})",
            f"draft = {model}.from_pretrained({pair.draft!r}, dtype='auto').to(target.device)",
            "ids = tokenizer('def fibonacci(n):', return_tensors='pt').input_ids.to(target.device)",
            "stops = [tokenizer.eos_token_id]",
            f"output = dflash_generate(draft, target, ids, 256, stops, block_size={pair.num_draft_tokens + 1})",
            "print(tokenizer.decode(output[0]))",
        )
        return ServeCommand(lines, pair.num_draft_tokens)


@check_transformers(
    "S13",
    "warning",
    effect="z-lab's code of April 2026 looks for the key only there, and stops",
    fix="dflash validate {draft} --target {target} --engine transformers --fix-out {out}",
    source=ZLAB,
)
def keys_are_where_the_reference_looks(subject: Subject) -> Iterator[Problem]:
    """block_size and num_target_layers are at the top level, where z-lab's code of April 2026 reads them."""
    if not isinstance(subject.format, Native) or subject.format.family != Format.family:
        return
    for key in ("block_size", "num_target_layers"):
        if subject.config.get(key) is None:
            yield Problem(subject.location(key), "missing at the top level")


@check_transformers(
    "S30",
    effect="z-lab's code crops keys and values only, so rejected tokens stay in the state and change the text",
    fix="dflash serve-command {draft} --target {target} --engine sglang # keeps the state after every verified token",
    source="z-lab/dflash#172; huggingface/transformers#49036; sgl-project/sglang#28010",
)
def reference_keeps_no_rejected_tokens(subject: Subject) -> Iterator[Problem]:
    """Every layer of the target keeps keys and values, not a state, because z-lab's code does not roll back states."""
    kinds = subject.target.layer_kinds if subject.target is not None else ()
    stateful = [kind for kind in STATE_KINDS if kind in kinds]
    if stateful:
        count = sum(kind in STATE_KINDS for kind in kinds)
        yield Problem(
            f"target {CONFIG_FILE}:layer_types", f"{count} of {len(kinds)} layers keep a state ({', '.join(stateful)})"
        )


@check_transformers(
    "S24",
    effect="z-lab's code reads only the top-level is_causal and the kind of each layer",
    fix="dflash validate {draft} --engine transformers --fix-out {out}",
    source="z-lab/dflash 0.1.0 model.py",
    outcome="drops",
)
def reference_serves_the_trained_causality(subject: Subject) -> Iterator[Problem]:
    """z-lab's code serves every layer with the causality that the config states."""
    yield from repairable_causality(NAME, subject)


@check_transformers(
    "S31",
    effect="z-lab's code ignores attention sinks",
    fix="dflash serve-command {draft} --target {target} --engine vllm # vLLM and SGLang compute them",
    source="z-lab/dflash 0.1.0 model.py; vLLM 0.33.0 qwen3_dflash.py; SGLang 0.5.23 models/dflash.py",
    outcome="drops",
)
def reference_has_no_sinks(subject: Subject) -> Iterator[Problem]:
    """The draft works without attention sinks, because z-lab's code does not compute them."""
    if subject.stated.value("has_sinks") is True:
        yield Problem(subject.at("has_sinks"), "true")


METHODS = frozenset(
    {
        "aqlm", "auto-round", "awq", "bitnet", "bitsandbytes", "compressed-tensors", "eetq", "fbgemm_fp8",
        "fouroversix", "fp8", "fp_quant", "gemma", "gguf", "gptq", "higgs", "hqq", "metal", "mxfp4", "mxfp8", "nvfp4",
        "quanto", "quark", "sinq", "spqr", "torchao", "vptq",
    }
)  # fmt: skip
"""Methods of packed weights that transformers loads. Source: transformers 5.23.0 quantizers/auto.py."""


def _check_packing(config: Mapping[str, Any]) -> None:
    """Require an object with a method, if the config states a quantization.

    Raises:
        EngineStops: the statement is not an object, or it names no method.
    """
    packing = config.get("quantization_config")
    if packing is None:
        return
    if not isinstance(packing, dict):
        raise EngineStops("quantization_config", f"found {packing!r}, expected an object")
    if packing.get("quant_method") is None and not any(map(packing.get, ("load_in_8bit", "load_in_4bit"))):
        raise EngineStops("quantization_config.quant_method", "missing")


def _misread(subject: Subject) -> tuple[str, ...]:
    """The matrices of packed numbers that transformers takes for plain ones, because it knows no method for them.

    transformers passes over an unknown method, such as Model-Optimizer's, and over hf_quant_config.json.
    """
    packing = as_object(subject.config.get("quantization_config"))
    if packing.get("quant_method") in METHODS or any(map(packing.get, ("load_in_8bit", "load_in_4bit"))):
        return ()
    return tuple(
        name
        for name, info in (subject.tensors or {}).items()
        if name.startswith(("layers.", "fc.")) and name.endswith(".weight") and info.dtype not in FLOATS
    )


PACKAGES: Mapping[str, str] = {
    "fp8": "accelerate", "fbgemm_fp8": "accelerate", "compressed-tensors": "compressed-tensors", "gptq": "optimum",
    "awq": "gptqmodel", "bitsandbytes": "bitsandbytes",
}  # fmt: skip
"""Method of packed weights -> a package that transformers needs for it and that z-lab's package does not install."""


@check_transformers(
    "S43",
    effect="z-lab's loader stops with an ImportError, unless the package is installed beside it",
    fix="pip install accelerate # or the package that the finding names; dflash has not run this loader with it",
    source="transformers 5.23.0 quantizers/; dflash 0.1.0 METADATA",
)
def reference_has_the_package_of_packed_weights(subject: Subject) -> Iterator[Problem]:
    """The packages that z-lab's package installs suffice for transformers to load the draft's packed weights."""
    if not isinstance(subject.format, Native):
        return
    method = as_object(subject.config.get("quantization_config")).get("quant_method")
    package = PACKAGES.get(method) if isinstance(method, str) else None
    if package is not None:
        yield Problem(subject.location("quantization_config.quant_method"), f"{method}, which needs {package}")
