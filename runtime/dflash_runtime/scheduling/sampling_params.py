"""How the tokens of a request are chosen, and when it ends: the parameters, checked."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from numbers import Real
from operator import index as as_integer
from typing import Annotated, Any

from dflash_kernels.logits.temperature import MIN_TEMPERATURE
from dflash_runtime.documents import OPTIONAL
from dflash_runtime.errors import RequestError
from dflash_runtime.scheduling.grammar import Grammar

MAX_STOP_IDS = 16
"""The most stop ids of a request. The device compares every token with all of them."""

INT64 = range(-(2**63), 2**63)
"""The values of an integer on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    temperature      below `MIN_TEMPERATURE` the request is greedy
    seed             the same seed samples the same text in every run; without one the engine draws a seed per request,
                     so equal prompts give different texts
    stop_token_ids   each ends the request and stays its last token; `ignore_eos` makes them ordinary tokens
    verify_width     how many rows of each block are verified, including the anchor. The draft always drafts the whole
                     block, except with width 1, which is plain decoding.
    grammar          the texts that the answer may have. It ends at a stop token, where the grammar allows an end. While
                     a request with a grammar runs, no step begins before the results of the last one are read

    Raises:
        RequestError: a value has the wrong type or is out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    verify_width: int | None = None
    grammar: Annotated[Grammar | None, OPTIONAL] = None

    def __post_init__(self) -> None:
        self._check_integer("max_new_tokens", range(1, INT64.stop), "1 to 2**63 - 1")
        self._check_integer("top_k", range(INT64.stop), "0 (off) to 2**63 - 1")
        self._check_integer("seed", INT64, "a 64-bit integer")
        self._check_integer("verify_width", range(1, INT64.stop), "1 (the last committed token) to 2**63 - 1")
        self._check_real("temperature", lambda value: 0 <= value < float("inf"), "a finite number of 0 or more")
        self._check_real("top_p", lambda value: 0 < value <= 1, "a number in (0, 1]")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(field="ignore_eos", found=self.ignore_eos, expected="True or False")
        stops = check_ids(self.stop_token_ids, "stop_token_ids")
        if len(stops) > MAX_STOP_IDS:
            raise RequestError(
                f"{len(stops)} stop ids, expected at most {MAX_STOP_IDS}",
                id="too-many-stop-ids", field="stop_token_ids", found=len(stops), expected=f"at most {MAX_STOP_IDS}",
            )  # fmt: skip
        wrong = next((stop for stop in stops if not 0 <= stop < INT64.stop), None)
        if wrong is not None:
            raise RequestError(field="stop_token_ids", found=wrong, expected="64-bit integers of 0 or more")
        object.__setattr__(self, "stop_token_ids", stops)

    def _check_integer(self, name: str, allowed: range, expected: str) -> None:
        """Check that a field is an integer in its range, and store it as a plain integer.

        `seed` and `verify_width` may be None.
        """
        value = getattr(self, name)
        if value is None and name in ("seed", "verify_width"):
            return
        try:
            number = plain_integer(value)
        except TypeError as error:
            raise RequestError(field=name, found=value, expected="an integer") from error
        if number not in allowed:
            raise RequestError(field=name, found=number, expected=expected)
        object.__setattr__(self, name, number)

    def _check_real(self, name: str, is_allowed: Callable[[float], bool], expected: str) -> None:
        """Check that a field is a number in its range, and store it as a float."""
        value = getattr(self, name)
        try:
            number = float(value) if is_real(value) else float("nan")
        except OverflowError:  # an integer beyond the largest float
            number = float("nan")
        if not is_allowed(number):
            raise RequestError(field=name, found=value, expected=expected)
        object.__setattr__(self, name, number)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def max_drafts(self) -> int | None:
        """The most draft tokens of a block that are verified for this request. None means all."""
        return None if self.verify_width is None else self.verify_width - 1

    @property
    def has_filters(self) -> bool:
        """Whether top-k or top-p cut the distribution that this request samples from."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def effective_stops(self) -> tuple[int, ...]:
        """The ids that end this request: empty with `ignore_eos`."""
        return () if self.ignore_eos else self.stop_token_ids

    @property
    def settings(self) -> dict[str, Any]:
        """The parameters as values of a JSON document."""
        return {**asdict(self), "stop_token_ids": list(self.stop_token_ids)}

    def with_stops(self, token_ids: Iterable[int]) -> "SamplingParams":
        """The same parameters with these stop ids added."""
        return replace(self, stop_token_ids=tuple(sorted({*self.stop_token_ids, *token_ids})))


def check_ids(token_ids: Iterable[int], field: str = "prompt_token_ids") -> tuple[int, ...]:
    """Token ids as plain integers. A value such as 1.0 is refused and not rounded, since it is hardly a token id.

    Raises:
        RequestError: `token_ids` is not a sequence, or one of them is not an integer.
    """
    try:
        values = tuple(token_ids)
    except TypeError as error:
        raise RequestError(field=field, found=token_ids, expected="a sequence of token ids") from error
    if set(map(type, values)) <= {int}:
        return values
    ids = []
    for value in values:
        try:
            ids.append(plain_integer(value))
        except TypeError as error:
            raise RequestError(field=field, found=value, expected="an integer as token id") from error
    return tuple(ids)


def is_real(value: object) -> bool:
    """Whether a value is a number of any real type, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def plain_integer(value: Any) -> int:
    """An integer of any integer type as a plain one.

    Raises:
        TypeError: it is not an integer, or it is a bool.
    """
    if isinstance(value, bool):
        raise TypeError("a bool")
    return as_integer(value)


def derive_seed(base: int, index: int) -> int:
    """The seed of request `index`, derived from a common base: a signed 64-bit integer."""
    digest = hashlib.blake2b(f"{base}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
