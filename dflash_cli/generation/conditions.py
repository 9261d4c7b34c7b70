"""Conditions under which one run answers every prompt: thinking on or off, context length, with or without draft."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any, Literal

from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.documents import HIDDEN, OPTIONAL, computed_key
from dflash_runtime.errors import UsageError

THINKING_KEY = "enable_thinking"
"""The name of the thinking switch in most chat templates."""
THINKING_VALUE = "$thinking"
"""Placeholder for the value in --chat-template-kwargs, for templates that name the switch otherwise."""
SWITCH = {"on": True, "off": False}
UNITS = {"k": 1024, "m": 1024**2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One way of answering a prompt. None means that the run does not set this part.

    The prompt is padded to `context_len` tokens. `template_options` follow from `thinking`. With `is_plain` the target
    decodes without its draft.
    """

    thinking: str | None = None
    context_len: Annotated[int | None, "number of tokens to which prompts were padded"] = None
    grammar: Annotated[Literal["on", "off"] | None, OPTIONAL, "whether answers followed the run's grammar"] = None
    is_plain: Annotated[bool, HIDDEN] = False
    template_options: Annotated[Mapping[str, Any], HIDDEN] = field(default_factory=dict)

    @property
    @computed_key
    def name(self) -> str:
        """`thinking on, 4k`; empty for a run without conditions."""
        parts = [
            f"thinking {self.thinking}" if self.thinking is not None else None,
            _short(self.context_len) if self.context_len is not None else None,
            {"on": "grammar", "off": "no grammar"}.get(self.grammar or ""),
            "no draft" if self.is_plain else None,
        ]
        return ", ".join(part for part in parts if part)


def parse_tokens(text: str) -> int:
    """Return the number of tokens of `4k` (4,096) or `500`.

    Raises:
        ValueError: the text has another form.
    """
    number, factor = (text[:-1], UNITS[text[-1].lower()]) if text[-1:].lower() in UNITS else (text, 1)
    return int(number) * factor


def make_conditions(
    thinking: Sequence[str], context_lens: Sequence[int], *, with_plain: bool, template_options: str | None
) -> tuple[Condition, ...]:
    """Return every combination of the values, conditions without a draft last. Empty for a run without conditions.

    Raises:
        UsageError: a value is given twice.
    """
    for field_name, values in (("--thinking", thinking), ("--context-lengths", context_lens)):
        if len(set(values)) < len(values):
            raise UsageError(field=field_name, found=list(values), expected="each value once")
    if not (thinking or context_lens or with_plain):
        return ()
    return tuple(
        Condition(
            thinking=word,
            context_len=length,
            is_plain=is_plain,
            template_options={} if word is None else {_thinking_key(template_options): SWITCH.get(word, word)},
        )
        for is_plain, length, word in product(
            (False, True) if with_plain else (False,), context_lens or (None,), thinking or (None,)
        )
    )


def with_and_without(conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    """Return every condition with the run's grammar, and then without it."""
    each = conditions or (Condition(),)
    return tuple(replace(item, grammar=word) for word in ("on", "off") for item in each)


def _thinking_key(template_options: str | None) -> str:
    """The template's name of the switch: whatever has THINKING_VALUE, else THINKING_KEY."""
    try:
        options = loads(template_options or "{}")
    except ValueError:
        return THINKING_KEY  # `find_tokenizer` reports the error
    named = [key for key, value in options.items() if value == THINKING_VALUE] if isinstance(options, dict) else []
    return named[0] if named else THINKING_KEY


def _short(num_tokens: int) -> str:
    """`4k`, `500`."""
    return f"{num_tokens // 1024}k" if num_tokens % 1024 == 0 else str(num_tokens)
