"""Results of `dflash benchmark` of dflash-mlx: `summary.json` or `results.json`, of one prompt or of a suite."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dflash_cli.acceptance.conversation_counts import ConversationCounts
from dflash_cli.comparing.measured_result import RESULT_FORMATS, MeasuredResult, ResultFile, ResultFormat
from dflash_runtime.checkpoint.stored.digests import digest_text
from dflash_runtime.json_values import as_number

ROUNDING = 1e-6
"""The largest difference between a number of tokens and the product of the ratios that the file states."""


@RESULT_FORMATS.register("dflash-mlx")
class DflashMlx(ResultFormat):
    """Steps and accepted tokens of each prompt, from the ratios in the file.

    `tokens_per_cycle` is generated tokens / steps. `acceptance_ratio` is accepted / generated tokens, not a share of
    the draft tokens. A step commits its anchor and the accepted tokens. Near the token limit blocks are shortened to
    the tokens that are left. Prompts are identified by their text.

    Source: bstnxbt/dflash-mlx dflash_mlx/benchmark.py at 9295dddb (one prompt) and ec6bacd9 (suites);
    benchmark/results/qwen3-5-9b-1024.json at 26cb2553 (an older config).
    """

    title: ClassVar[str] = "dflash-mlx benchmark"

    def recognises(self, file: ResultFile) -> bool:
        return file.has("hardware", "config", "runs", "summary") and all(
            "dflash" in run for run in _runs(file.document)
        )

    def read(self, file: ResultFile) -> MeasuredResult:
        document = file.document
        config = document["config"]
        copied = config.get("copyspec_mode")
        if copied not in (None, "off"):
            raise file.refuse(
                f"copyspec_mode is {copied}: tokens copied from the prompt count as accepted draft tokens",
                "measure with --copyspec-mode off",
                id="mixed-drafts",
            )
        rows = [_prompt(report) for report in document.get("prompts") or [document]]
        steps = sum(row.num_steps for row in rows)
        if not steps:
            raise file.refuse("no run has verify steps; dflash-mlx then decoded plainly", id="no-steps")
        facts = {
            "draft": config.get("draft", config.get("draft_model")),
            "target": config.get("model", config.get("target_model")),
            "num_speculative_tokens": config["block_tokens"] - 1,
            "max_new_tokens": config.get("max_tokens", config.get("max_new_tokens")),
            "chat": config.get("use_chat_template"),
            "verify_mode": config.get("verify_mode"),
            "verify_len_cap": config.get("verify_len_cap") or None,
        }
        return self.of_length(
            file,
            sum(row.num_tokens for row in rows) / steps,
            conversations=tuple(rows),
            definition="1 + accepted / steps, blocks cut at the token limit (dflash-mlx)",
            facts={name: value for name, value in facts.items() if value is not None},
        )


def _runs(document: Mapping[str, Any]) -> Sequence[Any]:
    """Return the runs of a report as objects; others give one object without keys."""
    runs = document["runs"]
    is_list = isinstance(runs, list) and bool(runs) and all(isinstance(run, dict) for run in runs)
    return runs if is_list else [{}]


def _prompt(report: Mapping[str, Any]) -> ConversationCounts:
    """Return the counts of a prompt, its repeats together.

    Raises:
        ValueError: the figures of a run contradict each other.
    """
    config, counts = report["config"], [_counts(run["dflash"]) for run in report["runs"]]
    return ConversationCounts(
        digest=digest_text(config["prompt"]),
        name=str(config.get("prompt_id", "prompt")),
        num_tokens=sum(steps + accepted for steps, accepted in counts),
        num_steps=sum(steps for steps, _ in counts),
    )


def _counts(run: Mapping[str, Any]) -> tuple[int, int]:
    """Return the steps and accepted tokens of a run."""
    steps = run["cycles"]
    generated = _whole("tokens_per_cycle x cycles", as_number(run["tokens_per_cycle"]) * steps)
    accepted = _whole("acceptance_ratio x generated tokens", as_number(run["acceptance_ratio"]) * generated)
    if run.get("accepted_from_draft", accepted) != accepted or generated > steps + accepted:
        raise ValueError(
            f"{steps} cycles, {accepted} accepted and {generated} generated tokens contradict each other; a cycle "
            "commits one token and the accepted ones"
        )
    return steps, accepted


def _whole(name: str, value: float) -> int:
    if abs(value - round(value)) > ROUNDING * max(1.0, value):
        raise ValueError(f"{name}: found {value!r}, expected a whole number")
    return round(value)
