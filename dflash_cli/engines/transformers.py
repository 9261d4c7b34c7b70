"""transformers with z-lab's code (PyPI dflash 0.1.0): its releases, its causality, its rules, and its program.

z-lab's package does not include a server, so a short program runs the draft.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import ClassVar

from dflash_cli.engines.serving_engine import (
    ENGINES,
    Habit,
    Release,
    ServeCommand,
    ServedPair,
    ServingEngine,
    repairable_causality,
    stated_once,
)
from dflash_cli.formats.dialect import Format
from dflash_cli.formats.native import Native
from dflash_cli.rules.rule import Outcome, Problem, check
from dflash_cli.rules.subject import CONFIG_FILE, Subject
from dflash_runtime.checkpoint.layer_kinds import STATE_KINDS

NAME = "transformers"
check_transformers = partial(check, engines=(NAME,))
ZLAB = "z-lab/dflash model.py, 0.1.0 and April 2026"


@ENGINES.register(NAME)
class Transformers(ServingEngine):
    """z-lab's package on a release of transformers."""

    name: ClassVar[str] = NAME
    reads: ClassVar[tuple[type[Format], ...]] = (Native,)
    releases: ClassVar[tuple[Release, ...]] = ((5, 23),)
    follows_reference: ClassVar[bool] = True
    takes_other_widths: ClassVar[bool] = False
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

    def causality(self, subject: Subject) -> tuple[bool, ...]:
        """The top-level is_causal, else the layers' kinds. Source: z-lab/dflash 0.1.0 model.py."""
        return stated_once(subject.config.get("is_causal"), subject)

    def serve_command(self, pair: ServedPair) -> ServeCommand:
        """A program. It does not call the script of z-lab's package, which is also named dflash."""
        lines = (
            "# pip install 'dflash[local]' in a new environment: this is z-lab's package",
            "from dflash.model import DFlashDraftModel, dflash_generate",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f"target = AutoModelForCausalLM.from_pretrained({pair.target!r}, dtype='auto', device_map='auto')",
            f"tokenizer = AutoTokenizer.from_pretrained({pair.target!r})",
            f"draft = DFlashDraftModel.from_pretrained({pair.draft!r}, dtype='auto').to(target.device)",
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
    if not isinstance(subject.format, Native):
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
