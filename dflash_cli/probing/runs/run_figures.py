"""The figures of a run: the rise of the server's counters, and acceptance from the best source."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from dflash_cli.acceptance.conversation_counts import ConversationCounts, count_conversations, distinct_prompts
from dflash_cli.acceptance.intervals.statistics import DEFINITIONS, Summary, summarise
from dflash_cli.generation.answers import Answer
from dflash_cli.probing.counters.counter_agreement import Answered, describe_odd, is_of_others
from dflash_cli.probing.counters.server_counters import ServerCounters
from dflash_cli.probing.runs.counter_watch import CounterWatch, await_counters
from dflash_cli.probing.served.served_answer import ServedAnswer
from dflash_cli.probing.servers.http_client import TimeIsUp
from dflash_cli.probing.servers.inference_server import InferenceServer
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_runtime.metrics import AcceptanceCounts
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural

Origin = Literal["answers", "counters", "timings", "nothing"]
Rows = list[tuple[Answer, ServedAnswer]]


def count_run(
    server: InferenceServer, before: ServerCounters | None, found: Rows, num_extra: float, watch: CounterWatch | None
) -> tuple[ServerCounters | None, list[Notice]]:
    """The rise of the server's counters during these answers, and notes about other traffic or a restart."""
    if before is None or not found:
        return None, []
    num_tokens = sum(len(served.token_ids) for _, served in found)
    if not before.is_exact:
        return None, [_rounded(before)]
    try:
        now = await_counters(server, before, num_requests=len(found), num_tokens=num_tokens)
    except TimeIsUp:
        return None, []
    risen = None if now is None else now.since(before)
    if risen is None:
        text = "the server restarted during the run, because a counter fell; its counters are not used"
        return None, [Notice(text, id="server-restarted")]
    if not risen.is_exact:
        return None, [_rounded(risen)]
    if risen.num_requests is not None and risen.num_requests < len(found):
        few = f"the server counted {plural(risen.num_requests, 'request')} of {len(found)}"
        text = f"{few}, and no counter fell: it counts late, or other servers answer; its counters are not used"
        return None, [Notice(text, id="requests-not-counted")]
    num_prompt = sum(len(answer.output.prompt_token_ids) for answer, _ in found)
    own, notes = Answered.of([served for _, served in found], num_prompt), []
    odd = None if num_extra else describe_odd(risen, own)
    if odd is not None:
        return risen, [Notice(odd, id="counter-miscounts")]
    if is_of_others(risen, own, num_extra):
        notes.append(Notice(_more_counted(risen, own), id="other-clients-counted"))
    if watch is not None and watch.num_foreign:
        text = f"{plural(watch.num_foreign, 'answer')} without own steps: other clients sent requests meanwhile"
        notes.append(Notice(text, id="steps-of-other-clients"))
    return risen, notes


def _rounded(counters: ServerCounters) -> Notice:
    text = f"the server prints its counters in steps of {counters.resolution}: they are not used"
    return Notice(text, id="counters-rounded")


def _more_counted(risen: ServerCounters, own: Answered) -> str:
    """The counts that are larger than the answers."""
    if (risen.num_requests or 0) > own.num_answers:
        others = plural((risen.num_requests or 0) - own.num_answers, "request")
        return f"the server counted {others} more than this run sent: its counters include other clients"
    counted = f"{risen.num_tokens} tokens"
    if (risen.num_tokens or 0) <= own.num_tokens:
        counted = f"{risen.num_drafts} steps and {risen.num_accepted_drafts} accepted tokens"
    why = "requests of other clients ran meanwhile, and its counters include them"
    return f"the server counted {counted} and answered {own.num_tokens} tokens: {why}"


def pool_run(
    answers: Sequence[Answer],
    served: Sequence[ServedAnswer],
    counted: ServerCounters | None,
    facts: ServerFacts,
    *,
    confidence: float,
    num_resamples: int,
) -> tuple[Summary, Origin, list[Notice]]:
    """Acceptance from the best source: the steps of each answer, otherwise counters, otherwise sums in answers."""
    stepped = [answer for answer in answers if answer.output.acceptance_lengths]
    if stepped:
        longest = max(max(answer.output.acceptance_lengths) for answer in stepped)
        total = summarise(
            [answer.output for answer in stepped],
            max(facts.num_draft_tokens or 0, longest - 1),
            conversations=[answer.row.index for answer in stepped],
            prompts=distinct_prompts(stepped),
            confidence=confidence,
            num_resamples=num_resamples,
        )
        lacking = len(answers) - len(stepped)
        note = Notice(f"{plural(lacking, 'answer')} without steps, left out of acceptance", id="answers-without-steps")
        return total, "answers", [note] if lacking else []
    num_tokens = sum(len(answer.output.token_ids) for answer in answers)
    if counted is not None and counted.num_drafts and counted.num_accepted_drafts is not None:
        per_pos = counted.per_pos_accepted if counted.has_sound_positions else ()
        counts = AcceptanceCounts(len(per_pos), counted.num_drafts, counted.num_accepted_drafts, list(per_pos))
        why = "the server counts all requests together"
        return _summary(counts, len(served), num_tokens, why, counted.histogram or ()), "counters", []
    sums = [item for item in served if item.num_steps and item.num_accepted is not None]
    if sums:
        counts = AcceptanceCounts(
            0, sum(item.num_steps or 0 for item in sums), sum(item.num_accepted or 0 for item in sums)
        )
        text = "the number of steps is a lower bound if each step drafts, so the length is an upper bound; "
        text += "positions are unknown"
        note = Notice(text, id="length-is-upper-bound")
        return _summary(counts, len(sums), num_tokens, "answers bring sums, not steps"), "timings", [note]
    none = _summary(AcceptanceCounts(facts.num_draft_tokens or 0), len(answers), num_tokens, "no verify steps")
    return none, "nothing", []


def _summary(
    counts: AcceptanceCounts, num_requests: int, num_tokens: int, why: str, histogram: Sequence[int] = ()
) -> Summary:
    """A summary of totals. Only vLLM's definition can be computed from totals."""
    return Summary(
        counts=counts,
        num_requests=num_requests,
        num_conversations=num_requests,
        num_tokens=num_tokens,
        acceptance_len_interval=None,
        acceptance_len_no_interval=why,
        per_pos_intervals=(None,) * counts.num_speculative_tokens,
        histogram=tuple(histogram),
        definitions=dict.fromkeys(DEFINITIONS) | {"vllm": counts.acceptance_len},
    )


def conversations_of(answers: Sequence[Answer], *, is_ordered: bool) -> tuple[ConversationCounts, ...]:
    """The conversations. Steps far from the prompt are counted only if the order of steps is known."""
    found = count_conversations([answer for answer in answers if answer.output.acceptance_lengths])
    return found if is_ordered else tuple(replace(item, num_far_tokens=0, num_far_steps=0) for item in found)


def find_disagreement(origin: Origin, total: Summary, counted: ServerCounters | None, num_resumed: int) -> list[Notice]:
    """A note if answers and counters report different numbers of steps."""
    if origin != "answers" or counted is None or num_resumed:
        return []
    if counted.num_drafts in (None, total.counts.num_drafts):
        return []
    text = f"answers report {total.counts.num_drafts} steps, the server's counters {counted.num_drafts}"
    return [Notice(text, id="step-counts-differ")]
