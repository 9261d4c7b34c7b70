"""Give prompts an exact number of tokens by a change at their front, so that only the context grows.

A short prompt gets unrelated text in front. A long prompt loses text at the front of the user's first message. The
filler is entries of a made-up log book, generated sentence by sentence from patterns. It is deterministic, and each
prompt has its own. A longer filler continues a shorter one. Dedicated to the public domain (CC0).
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

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
FRAMES = (
    (f"{INTRODUCTION} ", f"{END}\n\n"),
    (f"{INTRODUCTION} ", f" {END}\n\n"),
    ("", "\n\n"),
    ("", "\n"),
    ("", " "),
    ("", ""),
)
"""Texts before and after the filler, tried in order: the first ones may need more tokens than are missing."""
NEARBY = 64
"""Number of characters to both sides of a cut that are tried if the cut does not give the exact number of tokens."""
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


def fit_row(row: PromptRow, num_tokens: int, tokenizer: Tokenizer | None, *, chat: bool) -> PromptRow | None:
    """Return the row with a first turn of exactly `num_tokens` tokens, the chat template's tokens included.

    Filler or text of the user is cut within a sentence. Returns None if no cut gives the number, for example because
    template and system message alone are longer.

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

    def missing(changed: PromptRow) -> int:
        return num_tokens - count_tokens(changed, tokenizer, chat=chat)

    num_missing = missing(row)
    if num_missing == 0:
        return row
    assert tokenizer is not None
    sentences = filler(row.digest)
    if num_missing < 0:
        text = _user_text(row)
        place = _last_place(lambda length: missing(_with_user_text(row, text[len(text) - length :])), 1, len(text))
        if place is None:
            return None
        row = _with_user_text(row, text[len(text) - place :])
        if missing(row) == 0:
            return row
    return _lengthen(row, sentences, missing, tokenizer)


def _lengthen(
    row: PromptRow, sentences: Iterator[str], missing: Callable[[PromptRow], int], tokenizer: Tokenizer
) -> PromptRow | None:
    """Return the row with filler before the user's first text, so that no token is missing, or None."""
    text, drawn = _user_text(row), _draw(sentences, missing(row), tokenizer)

    def framed(start: str, filling: str, end: str) -> PromptRow:
        return _with_user_text(row, start + filling + end + text)

    def fill(start: str, end: str) -> PromptRow | None:
        while (short := missing(framed(start, "".join(drawn), end))) > 0:
            drawn.extend(_draw(sentences, short, tokenizer))
        num_kept, excess = len(drawn), -short
        while num_kept > 0 and excess > 0:
            num_kept = max(0, num_kept - max(1, excess // MANY_TOKENS))
            excess = -missing(framed(start, "".join(drawn[:num_kept]), end))
        whole = "".join(drawn)
        num_whole = len("".join(drawn[:num_kept]))
        place = _last_place(lambda length: missing(framed(start, whole[:length], end)), num_whole, len(whole))
        filled = framed(start, whole[: place or 0], end)
        return filled if missing(filled) == 0 else None

    return next((found for frame in FRAMES if (found := fill(*frame)) is not None), None)


def _last_place(missing: Callable[[int], int], low: int, high: int) -> int | None:
    """Return the number of characters with which no token is missing, or else the fewest are; None if all exceed.

    The number of missing tokens falls with the characters, but for single characters that join or split tokens. So the
    neighbours of the change of sign are tried, too.
    """
    if low > high or missing(low) < 0:
        return None
    first, reach = low, 1
    while first + reach < high and missing(first + reach) > 0:
        low, reach = first + reach, 2 * reach
    high = min(high, first + reach)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if missing(middle) > 0 else (low, middle)
    nearby = (high + side * step for step in range(NEARBY) for side in (1, -1))
    return next((place for place in nearby if place >= first and missing(place) == 0), low)


def _draw(sentences: Iterator[str], num_tokens: int, tokenizer: Tokenizer) -> list[str]:
    """Return one sentence more than `num_tokens` tokens need, if each sentence is counted alone."""
    drawn: list[str] = []
    while num_tokens > 0:
        drawn.append(next(sentences))
        num_tokens -= len(tokenizer.encode(drawn[-1]))
    return [*drawn, next(sentences)]


def _user_text(row: PromptRow) -> str:
    """Return the user's first text.

    Raises:
        UsageError: no message of the user has text.
    """
    if row.kind == "messages":
        return str(row.value[_user_place(row)]["content"])
    return str(row.value if row.kind == "prompt" else row.value[0])


def _with_user_text(row: PromptRow, text: str) -> PromptRow:
    """Return the row with another first text of the user."""
    if row.kind == "prompt":
        return replace(row, value=text)
    if row.kind == "turns":
        return replace(row, value=[text, *row.value[1:]])
    place = _user_place(row)
    messages = [*row.value[:place], {**row.value[place], "content": text}, *row.value[place + 1 :]]
    return replace(row, value=messages)


def _user_place(row: PromptRow) -> int:
    for place, message in enumerate(row.value):
        if message["role"] == "user" and isinstance(message["content"], str):
            return place
    raise UsageError(
        f"{row.where}: --context-lengths needs a user message with text",
        id="padding-needs-text",
        field="--context-lengths",
        found="messages",
    )
