"""Pad prompts to a length with unrelated text in front, so that only the context grows.

The filler is entries of a made-up log book, generated sentence by sentence from patterns. It is deterministic, and each
prompt has its own. A longer filler continues a shorter one. Dedicated to the public domain (CC0).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from dflash_cli.generation.prompts import Conversation, PromptRow
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_runtime.errors import UsageError

PEOPLE = (
    "The keeper", "A trainee", "Ines Valdor", "The night crew", "Old Harkin", "Mara Lindqvist", "The harbour pilot",
    "A visiting surveyor", "Tobias Renn", "The second engineer", "Oyelaran", "The cook's nephew", "Captain Brisk",
    "Two students", "The quartermaster", "Silke Amundsen", "An inspector from the coast office", "Petra Holub",
)  # fmt: skip
DEEDS = (
    "measured", "repaired", "sketched", "labelled", "misplaced and found again", "weighed", "cleaned", "photographed",
    "compared notes on", "asked about", "wrote three lines on", "argued over", "replaced", "carried away", "counted",
    "catalogued", "tested", "covered with canvas", "borrowed", "described to the others",
)  # fmt: skip
THINGS = (
    "the brass barometer", "a coil of tarred rope", "the spare lamp glass", "four sacks of barley", "the tide tables",
    "a crate of limes", "the east window", "the cracked foghorn", "a bundle of letters", "the copper kettle",
    "an unsigned map of the shoals", "the signal flags", "a box of beeswax candles", "the weather vane", "two oars",
    "the drain under the pantry", "a jar of pickled herring", "the clock from the mess", "the rain gauge",
    "a crooked ladder",
)  # fmt: skip
PLACES = (
    "on the lower gallery", "behind the boathouse", "at the top of the stairs", "by the north jetty", "in the workshop",
    "under the old crane", "near the well", "at the edge of the dunes", "beside the stove", "in the attic",
    "outside the chapel", "along the sea wall", "in the coal store", "between the two sheds",
)  # fmt: skip
TIMES = (
    "before sunrise", "shortly after noon", "during the squall", "while the fog lasted", "at low water",
    "on the way back", "when the supply boat had left", "as the wind turned", "late in the evening",
    "between two showers", "at the change of the watch", "once the ice was gone",
)  # fmt: skip
RESULTS = (
    "and noted {number} in the margin", "which took {number} minutes", "for the {number}th time that year",
    "and found {number} small faults", "with {number} nails left over", "though only {number} of them agreed",
    "and paid {number} coins for it", "as page {number} of the manual asks", "and lost {number} steps of the count",
    "until the gauge read {number}",
)  # fmt: skip
INTRODUCTION = "From the log book of the station:"
END = "End of the log book."
FRAMES = ((f"{INTRODUCTION} ", f"{END}\n\n"), ("", "\n\n"))
"""Texts before and after the filler, tried in order: the first ones need more tokens than may be missing."""
SENTENCES_A_PARAGRAPH = 6
MANY_TOKENS = 64
"""More tokens than any sentence has. A text too long by this many stays too long without one sentence."""


def filler(seed: str) -> Iterator[str]:
    """Yield sentences without end. There are more than ten billion, so repetition is unlikely."""
    generator = random.Random(seed)
    for number in count(1):
        parts = [generator.choice(words) for words in (PEOPLE, DEEDS, THINGS, PLACES, TIMES, RESULTS)]
        sentence = " ".join(parts).format(number=generator.randrange(2, 980))
        yield f"{sentence}. " if number % SENTENCES_A_PARAGRAPH else f"{sentence}.\n\n"


def count_tokens(row: PromptRow, tokenizer: Tokenizer | None, *, chat: bool) -> int:
    """Return the number of tokens of a row's first turn, including the template's.

    Raises:
        RequestError: the row cannot be rendered.
    """
    return len(Conversation(row).next_prompt(tokenizer, chat=chat))


def pad_row(row: PromptRow, num_tokens: int, tokenizer: Tokenizer | None, *, chat: bool) -> PromptRow | None:
    """Return the row with filler in front, so that its first turn has `num_tokens` tokens.

    The filler is cut within a sentence. If no cut gives the exact number, the turn has the closest smaller number.
    Returns None if the row is already longer.

    Raises:
        UsageError: the row holds token ids, or lacks a user message with text.
        RequestError: the row cannot be rendered.
    """
    if row.kind == "prompt_token_ids":
        raise UsageError(
            f"{row.where}: --context-lengths needs text, but this row has prompt_token_ids",
            id="padding-needs-text",
            field="--context-lengths",
            found="prompt_token_ids",
        )
    missing = num_tokens - count_tokens(row, tokenizer, chat=chat)
    if missing <= 0:
        return row if missing == 0 else None
    assert tokenizer is not None
    sentences = _draw(filler(row.digest), missing, tokenizer)

    def over(head: str, end: str, text: str) -> int:
        return count_tokens(_put_in_front(row, head + text + end), tokenizer, chat=chat) - num_tokens

    for start, end in FRAMES:
        num_kept = len(sentences)
        while num_kept and (excess := over(start, end, "".join(sentences[:num_kept]))) > 0:
            num_kept -= max(1, excess // MANY_TOKENS)
        num_kept = max(0, num_kept)
        head, rest = start + "".join(sentences[:num_kept]), "".join(sentences[num_kept:])
        if over(head, end, "") <= 0:
            return _put_in_front(row, head + _cut(rest, partial(over, head, end)) + end)
    return row


def _cut(text: str, over: Callable[[str], int]) -> str:
    """Return the beginning of a text that fills a prompt best. `over` counts the tokens too many; none for no text."""
    low, high = 0, 1
    while high < len(text) and over(text[:high]) <= 0:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if over(text[:middle]) <= 0 else (low, middle)
    return text[:low]


def _draw(sentences: Iterator[str], num_tokens: int, tokenizer: Tokenizer) -> list[str]:
    """Return one sentence more than `num_tokens` tokens need, counted one by one."""
    drawn: list[str] = []
    while num_tokens > 0:
        drawn.append(next(sentences))
        num_tokens -= len(tokenizer.encode(drawn[-1]))
    return [*drawn, next(sentences)]


def _put_in_front(row: PromptRow, text: str) -> PromptRow:
    """Return the row with a text before the user's first text."""
    if row.kind == "prompt":
        return replace(row, value=text + row.value)
    if row.kind == "turns":
        return replace(row, value=[text + row.value[0], *row.value[1:]])
    return replace(row, value=_put_in_message(row, text))


def _put_in_message(row: PromptRow, text: str) -> Sequence[dict[str, Any]]:
    messages = list(row.value)
    for place, message in enumerate(messages):
        if message["role"] == "user" and isinstance(message["content"], str):
            messages[place] = {**message, "content": text + message["content"]}
            return messages
    raise UsageError(
        f"{row.where}: --context-lengths needs a user message with text",
        id="padding-needs-text",
        field="--context-lengths",
        found="messages",
    )
