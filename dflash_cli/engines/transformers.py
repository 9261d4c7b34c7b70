"""transformers with z-lab's own code (PyPI dflash 0.1.0): its releases, how it attends, its rules, its program.

A draft is served by a short program, since z-lab's package has no server.
"""

from collections.abc import Iterator
from typing import ClassVar

from dflash_cli.engines.serving_engine import (
    ENGINES,
    Release,
    ServeCommand,
    ServedPair,
    ServingEngine,
    stated_once,
)
from dflash_cli.validation.rule import FIX_COPY, Problem, check
from dflash_cli.validation.subject import Subject

NAME = "transformers"
ENGINE = (NAME,)
ZLAB = "z-lab/dflash model.py, 0.1.0 and April 2026"


@ENGINES.register(NAME)
class Transformers(ServingEngine):
    """z-lab's package on a release of transformers."""

    name: ClassVar[str] = NAME
    releases: ClassVar[tuple[Release, ...]] = ((5, 23),)
    follows_reference: ClassVar[bool] = True
    takes_other_widths: ClassVar[bool] = False

    def served_causality(self, subject: Subject) -> tuple[bool, ...] | None:
        """The top-level is_causal, else the layers' kinds. Source: z-lab/dflash 0.1.0 model.py."""
        return None if subject.is_speculators else stated_once(subject.config.get("is_causal"), subject)

    def serve_command(self, pair: ServedPair) -> ServeCommand:
        """A program; the package's script shares our name, and so is not called."""
        lines = (
            "# pip install 'dflash[local]' in an environment of its own: it is z-lab's package",
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


@check("S13", "warning", effect="the code of April stops, or assumes 16", fix=FIX_COPY, source=ZLAB, engines=ENGINE)
def keys_are_where_the_reference_looks(subject: Subject) -> Iterator[Problem]:
    """block_size and num_target_layers stand at the top level, where z-lab's first code reads them."""
    if subject.is_speculators:
        return
    for key in ("block_size", "num_target_layers"):
        if subject.config.get(key) is None:
            yield Problem(subject.location(key), "missing at the top level")


@check(
    "S24",
    effect="the reference reads the top-level is_causal and the layers' kinds only",
    fix=FIX_COPY,
    source="z-lab/dflash 0.1.0 model.py",
    outcome="drops",
    engines=ENGINE,
)
def reference_serves_the_trained_causality(subject: Subject) -> Iterator[Problem]:
    """z-lab's code serves every layer with the causality the config states."""
    engine, trained = subject.engine(NAME), subject.trained_causality
    served = engine.served_causality(subject) if engine is not None else None
    if served is not None and trained is not None and served != trained:
        yield Problem(
            subject.location("dflash_config.causal"),
            f"{sum(served)} of {len(served)} layers are served causally, the draft has {sum(trained)}",
            repair={"is_causal": trained[0]} if len(set(trained)) == 1 else {},
        )
