"""Evaluations with random verify steps, and their documents as `eval-acceptance --json` prints them."""

import json
import random
from pathlib import Path
from typing import Any

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.acceptance.conversation_counts import ConversationCounts
from dflash_cli.acceptance.intervals.statistics import summarise
from dflash_cli.acceptance.rejected_tokens import RejectedToken, Replacement
from dflash_cli.checkpoints.checkpoint_identity import Identity
from dflash_cli.generation.prompt_source import Failure, PromptSource
from dflash_cli.generation.run_facts import EvaluationRun
from dflash_runtime.documents import to_json
from dflash_runtime.scheduling.request import FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput

CATEGORIES = ("code", "talk & <b>more</b>")
HOSTILE = "</td><script>alert(1)</script>"


def request_output(lengths: list[int], index: int = 0) -> RequestOutput:
    """Return an output with one verify step per entry of `lengths`. Each step committed all its tokens."""
    return RequestOutput(
        index=index,
        prompt_token_ids=(1,),
        token_ids=(1,) * (sum(lengths) + 1),
        finish_reason=FinishReason.LENGTH,
        acceptance_lengths=tuple(lengths),
        committed_lengths=tuple(lengths),
    )


def evaluation_run(**changes: Any) -> EvaluationRun:
    """Facts about a run that was never made."""
    facts: dict[str, Any] = {
        "draft": None, "target": Identity(name="org/target", digest="4567"), "template_digest": None,
        "device_name": "cpu", "python": "3.11.7", "packages": {"dflash-cli": "0.1.0"},
        "date": "2026-01-01T00:00:00+00:00", "prompts_digest": "89ab", "rendered_prompts_digest": "cdef",
        "argv": ("dflash", "eval-acceptance", "org/draft", "-p", "my prompts.jsonl"),
        "engine": {"num_draft_tokens": None}, "max_num_requests": 8, "scheduling": "async", "num_prompts": 40,
        "target_runtime": "native", "prefix_cache": True, "adaptive_width": False,
    }  # fmt: skip
    return EvaluationRun(**facts | changes)


def drawn_evaluation(chance: float = 0.6, *, count: int = 128, num_drafted: int = 4, **settings: Any) -> Evaluation:
    """An evaluation of drafts that are each accepted with one chance, on prompts of two categories."""
    generator = random.Random(count)
    outputs = [
        request_output([_draw(generator, chance, num_drafted) for _ in range(12 + index % 7)], index)
        for index in range(count)
    ]
    groups = {name: [item for item in outputs if item.index % 2 == place] for place, name in enumerate(CATEGORIES)}
    return Evaluation(
        total=summarise(outputs, num_drafted, num_resamples=500),
        categories={name: summarise(items, num_drafted, num_resamples=500) for name, items in groups.items()},
        settings={
            "draft": "org/draft", "target": "org/target", "draft_digest": "0123", "target_digest": "4567",
            "num_speculative_tokens": num_drafted, "temperature": 0.0, "top_p": 1.0, "top_k": 0,
            "max_new_tokens": 128, "chat": True, **settings,
        },
        measured=evaluation_run(
            draft=Identity(name="org/draft", commit="a" * 40, digest="0123"),
            target=Identity(name="org/target", digest="4567"),
        ),
        prompts=PromptSource(name="my prompts.jsonl", num_available=count),
        conversations=tuple(
            ConversationCounts(
                digest=str(item.index),
                name=f"row {item.index}",
                category=CATEGORIES[item.index % 2],
                num_tokens=sum(item.acceptance_lengths),
                num_steps=len(item.acceptance_lengths),
                histogram=tuple(map(item.acceptance_lengths.count, range(1, num_drafted + 2))),
            )
            for item in outputs
        ),
        failed=(Failure(index=99, id="x", error="line 100: too long"),),
        rejected_tokens=(
            RejectedToken(
                token_id=7,
                text=HOSTILE,
                num_rejected=3,
                num_judged=4,
                replacements=(Replacement(token_id=8, text=" a|b", count=2),),
            ),
        ),
        seconds=1.5,
    )  # fmt: skip


def _draw(generator: random.Random, chance: float, num_drafted: int) -> int:
    length = 1
    while length <= num_drafted and generator.random() < chance:
        length += 1
    return length


def write_evaluation(path: Path, evaluation: Evaluation, **changes: Any) -> Path:
    """The document of an evaluation as a file; `changes` replace keys of it. The length follows from the counts."""
    content = to_json(evaluation) | changes
    accepted, steps = content["num_accepted_tokens"], content["num_drafts"]
    length = 1 + accepted / steps if isinstance(steps, int) and steps else None
    path.write_text(json.dumps({**content, "acceptance_len": length, **changes}))
    return path
