"""Choose the rows that a pair answers, one for each prompt and condition."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from dflash_cli.acceptance.exact_match import parse_number
from dflash_cli.generation.conditions import Condition
from dflash_cli.generation.padding import count_tokens, fit_row
from dflash_cli.generation.prompt_sets import BUNDLED, PromptSet, default_prompts
from dflash_cli.generation.prompt_source import PromptSource
from dflash_cli.generation.prompts import Conversation, PromptRow, Sample, naming_row, sample_rows
from dflash_cli.terminal import console
from dflash_runtime.errors import RequestError, UsageError
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.admission import check_prompt

if TYPE_CHECKING:
    from dflash_cli.generation.loaded_pair import OpenedPair
    from dflash_cli.generation.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChoice:
    """The rows to answer, their source, and whether text goes through the chat template."""

    rows: Sequence[PromptRow]
    source: PromptSource
    chat: bool


class SampleRequest(Protocol):
    """The options of a request that choose prompts."""

    @property
    def chat(self) -> bool | None: ...

    @property
    def num_prompts(self) -> int | None: ...

    @property
    def sample(self) -> Sample: ...

    @property
    def seed(self) -> int: ...

    @property
    def given_tools(self) -> Sequence[Mapping[str, Any]] | None: ...


def choose_prompts(
    request: SampleRequest, pair: "OpenedPair", given: PromptSet | None, *, conditions: tuple[Condition, ...] = ()
) -> PromptChoice:
    """Return the rows of the given set, or of the bundled set for the pair's target.

    Raises:
        UsageError: the prompts do not allow these conditions, or --chat is given without a chat template.
        RequestError: a row cannot be rendered, so it cannot be padded; or the target can take no row.
    """
    prompts = given or default_prompts(pair.references["target"])
    pair.check_chat(prompts.rows, chat=bool(request.chat))
    choice = choose_rows(
        prompts, pair.tokenizer, chat=request.chat, count=request.num_prompts, sample=request.sample,
        seed=request.seed, is_default=given is None,
    )  # fmt: skip
    rows = choice.rows
    if (request.num_prompts or 0) > len(rows):
        console.note(Notice(f"{prompts.name} has only {plural(len(rows), 'prompt')}", id="fewer-prompts"))
    if request.given_tools is not None:
        rows = [row if row.tools is not None else replace(row, tools=request.given_tools) for row in rows]
    _check_tools(rows, pair, chat=choice.chat)
    _refuse_if_all_fail(rows, pair, chat=choice.chat)
    if any(item.is_plain for item in conditions) and all(parse_number(row.reference) is None for row in rows):
        raise UsageError(
            "--exact-match both: every prompt lacks a reference number",
            id="no-reference-numbers",
            field="--exact-match",
            found="both",
            hint="use gsm8k, or add the key reference to your own rows",
        )
    asked = _put_under(rows, conditions, pair, chat=choice.chat, stride=len(prompts.rows))
    measured = {row.prompt_index for row in asked}
    kept = [row for row in rows if row.prompt_index in measured]
    source = replace(
        choice.source,
        num_cut=_num_cut(kept, conditions, pair, chat=choice.chat),
        num_too_long=len(rows) - len(kept),
    )
    if source.warning is not None:
        console.warn(source.warning)
    return PromptChoice(rows=asked, source=source, chat=choice.chat)


def choose_rows(
    prompts: PromptSet,
    tokenizer: "Tokenizer | None",
    *,
    chat: bool | None = None,
    count: int | None = None,
    sample: Sample = "stratified",
    seed: int = 0,
    is_default: bool = False,
) -> PromptChoice:
    """Return the rows of a set, each once. `is_default` is true if the user named no set."""
    is_chat = prompts.settle_chat(tokenizer, chat=chat)
    is_text = prompts.for_chat and not is_chat
    if is_text:
        prompts = prompts.as_text()
    count = prompts.count or count
    is_sample = count is not None and count < len(prompts.rows)
    rows = prompts.rows if not is_sample else sample_rows(prompts.rows, count or 0, seed=seed, sample=sample)
    source = PromptSource(
        name=prompts.name,
        num_available=len(prompts.rows),
        num_chosen=len(rows),
        sample=sample if is_sample else None,
        sample_seed=seed if is_sample and sample != "head" else None,
        is_bundled=prompts.name == BUNDLED and is_default,
        version=prompts.version,
        sha256=prompts.sha256,
        dataset=prompts.dataset,
        warning=Notice(
            f"the target's tokenizer lacks a chat template, so the questions of {prompts.name} are sent as plain text",
            id="questions-as-text",
        )
        if is_text and chat is None
        else None,
    )
    return PromptChoice(rows=rows, source=source, chat=is_chat)


def _put_under(
    rows: Sequence[PromptRow], conditions: Sequence[Condition], pair: "OpenedPair", *, chat: bool, stride: int
) -> list[PromptRow]:
    """Return every row under every condition. A prompt without a cut for some context length is left out of all.

    A row's index does not depend on the other rows, so a resumed run finds its answer.
    """
    if not conditions:
        return list(rows)
    _check_thinking(rows, conditions, pair, chat=chat)
    _check_lengths(conditions, pair)
    found: list[list[PromptRow]] = [[] for _ in conditions]
    for row in rows:
        under = [_put(row, condition, pair, chat=chat) for condition in conditions]
        for place, item in enumerate(under):
            if item is not None and None not in under:
                found[place].append(replace(item, index=place * stride + row.index))
    if not found[0]:
        lengths = [item.context_len for item in conditions if item.context_len is not None]
        raise UsageError(
            f"--context-lengths {min(lengths)}: no prompt can be cut to this number of tokens",
            id="prompts-too-long",
            field="--context-lengths",
            found=min(lengths),
        )
    return [row for members in found for row in members]


def _num_cut(rows: Sequence[PromptRow], conditions: Sequence[Condition], pair: "OpenedPair", *, chat: bool) -> int:
    """Return how many prompts are longer than the shortest context length."""
    shortest = min((item.context_len for item in conditions if item.context_len is not None), default=None)
    if shortest is None:
        return 0
    return sum(count_tokens(row, pair.tokenizer, chat=chat) > shortest for row in rows)


def _check_tools(rows: Sequence[PromptRow], pair: "OpenedPair", *, chat: bool) -> None:
    """Refuse tools that do not change a prompt.

    Raises:
        UsageError: a row with tools is sent without a chat template, or the template ignores tools.
    """
    row = next((row for row in rows if row.tools is not None), None)
    if row is None:
        return
    is_rendered = row.kind in ("messages", "turns") or (row.kind == "prompt" and chat)
    if not is_rendered or pair.tokenizer is None or not pair.tokenizer.has_template:
        raise UsageError(
            f"{row.where}: tools need a chat template, and this prompt is sent without one",
            id="tools-without-template", field="tools", hint="pass --chat if the target has a chat template",
        )  # fmt: skip
    prompts = [Conversation(item).next_prompt(pair.tokenizer, chat=chat) for item in (row, replace(row, tools=None))]
    if prompts[0] == prompts[1]:
        raise UsageError(
            f"{row.where}: the target's chat template ignores tools", id="tools-ignored", field="tools",
            hint="name a target that was trained to call tools, or leave out --tools",
        )  # fmt: skip


def _refuse_if_all_fail(rows: Sequence[PromptRow], pair: "OpenedPair", *, chat: bool) -> None:
    """Refuse rows before loading if the target can take none of them. Other text than an empty one is not tokenized.

    Raises:
        RequestError: the error of the first row.
    """
    first: RequestError | None = None
    for row in rows:
        if row.kind != "prompt_token_ids" and row.value != "" and pair.tokenizer is not None:
            return
        try:
            facts = pair.target.facts
            with naming_row(row):
                prompt = Conversation(row).next_prompt(pair.tokenizer, chat=chat)
                check_prompt(prompt, vocab_size=facts.vocab_size, max_model_len=facts.max_position_embeddings)
            return
        except RequestError as error:
            first = first or error
    if first is not None:
        raise first


def _check_lengths(conditions: Sequence[Condition], pair: "OpenedPair") -> None:
    """Refuse context lengths that all leave no room for an answer, before prompts are padded to them.

    If some of them fit, the prompts of the others fail one by one.

    Raises:
        UsageError: the pair has fewer positions than the shortest length.
    """
    known = [pair.target.facts.max_position_embeddings]
    if pair.draft is not None:
        known.append(pair.draft.config.max_position_embeddings)
    limit = min((item for item in known if item is not None), default=None)
    shortest = min(item.context_len or 0 for item in conditions)
    if limit is not None and shortest >= limit:
        raise UsageError(
            id="context-too-long", field="--context-lengths", found=shortest,
            expected=f"less than {limit}, the positions of the pair",
        )  # fmt: skip


def _put(row: PromptRow, condition: Condition, pair: "OpenedPair", *, chat: bool) -> PromptRow | None:
    named = replace(row, condition=condition if condition.name else None)
    if condition.context_len is None:
        return named
    return fit_row(named, condition.context_len, pair.tokenizer, chat=chat)


def _check_thinking(
    rows: Sequence[PromptRow], conditions: Sequence[Condition], pair: "OpenedPair", *, chat: bool
) -> None:
    """Refuse a thinking switch that does not change the prompt.

    Raises:
        UsageError: no prompt goes through a chat template, or the template ignores the switch.
    """
    switched = {item.thinking: item for item in conditions if item.thinking is not None}
    if not switched:
        return
    row = next((row for row in rows if row.kind in ("messages", "turns") or (row.kind == "prompt" and chat)), None)
    if row is None or pair.tokenizer is None or not pair.tokenizer.has_template:
        raise UsageError(
            "--thinking: every prompt is sent without a chat template",
            id="thinking-without-template",
            field="--thinking",
            hint="pass --chat if the target has a chat template",
        )
    rendered = {
        tuple(Conversation(replace(row, condition=item)).next_prompt(pair.tokenizer, chat=chat))
        for item in switched.values()
    }
    if len(switched) > 1 and len(rendered) < len(switched):
        raise UsageError(
            f"--thinking {','.join(filter(None, switched))}: the target's chat template renders equal prompts",
            id="thinking-ignored",
            field="--thinking",
            hint='if the template has another name for it, pass --chat-template-kwargs \'{"NAME": "$thinking"}\'',
        )
