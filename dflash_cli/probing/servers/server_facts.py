"""A server's description of itself."""

import re
from dataclasses import dataclass
from typing import Annotated

from dflash_cli.probing.served.served_answer import MAX_LEN
from dflash_runtime.documents import NOT_REQUIRED
from dflash_runtime.json_values import is_int
from dflash_runtime.metrics import MAX_DRAFT_TOKENS

MAX_CONCURRENCY = 1_000_000
UNQUANTISED = {"auto", "bfloat16", "bf16", "float16", "fp16", "half", "float32", "fp32", "float", "none", ""}
LOOKUPS = ("ngram", "lookup", "lookahead", "suffix")
"""Words in the names of methods that draft without a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A server's description of itself. A field is None if the server does not report it."""

    engine: Annotated[str, "a key of `SERVERS`"]
    release: Annotated[str | None, "as the server writes it, such as 0.33.0"]
    model: Annotated[str, "the name that requests give"]
    is_drafting: Annotated[bool | None, "whether a draft is configured"]
    num_draft_tokens: Annotated[int | None, "tokens drafted per step, K"] = None
    target: Annotated[str | None, NOT_REQUIRED, "the model that the server was started with"] = None
    draft: Annotated[str | None, "the draft that the server was started with"] = None
    method: Annotated[str | None, NOT_REQUIRED, "the way of drafting, as the server writes it"] = None
    max_concurrency: Annotated[int | None, "requests that the server runs at the same time"] = None
    max_queued: Annotated[int | None, NOT_REQUIRED, "requests that wait at most; the server refuses more"] = None
    max_len: Annotated[int | None, NOT_REQUIRED, "longest prompt and answer, in tokens"] = None
    end_ids: Annotated[tuple[int, ...], NOT_REQUIRED, "tokens that end an answer, as the server tells"] = ()
    recognised_by: Annotated[str | None, NOT_REQUIRED, "the sign of the engine"] = None
    kv_dtype: Annotated[str | None, NOT_REQUIRED, "data type of keys and values, as the server writes it"] = None
    has_prefix_cache: Annotated[bool | None, NOT_REQUIRED, "whether the prefix cache is switched on"] = None
    cache_block: Annotated[int | None, NOT_REQUIRED, "tokens of a block of the prefix cache"] = None
    undrafted_slots: Annotated[int | None, NOT_REQUIRED, "slots that the server says cannot draft"] = None
    lossy: Annotated[str | None, NOT_REQUIRED, "settings that make verification lossy, with their values"] = None
    adapters: Annotated[tuple[str, ...], NOT_REQUIRED, "adapters of the model that requests can name"] = ()
    active_adapter: Annotated[str | None, NOT_REQUIRED, "adapters that the server applies to measured requests"] = None
    own_penalties: Annotated[str | None, NOT_REQUIRED, "penalties that the server shows as its own, with values"] = None

    @property
    def is_lookup(self) -> bool:
        """Whether drafts are looked up in the text, so that no draft model runs. A list of methods may hold both."""
        names = re.findall(r"[\w-]+", (self.method or "").lower())
        return bool(names) and all(any(word in name for word in LOOKUPS) for name in names)

    @property
    def is_quantised(self) -> bool:
        """Whether keys and values are stored in fewer bits than the target computes with."""
        return self.kv_dtype is not None and self.kv_dtype.lower().removeprefix("torch.") not in UNQUANTISED

    def __post_init__(self) -> None:
        """Drop values that no server of the engine reports."""
        names = ("release", "target", "draft", "method", "kv_dtype", "lossy", "active_adapter", "own_penalties")
        texts = {name: isinstance(getattr(self, name), str) for name in names}
        numbers = {
            name: is_int(value := getattr(self, name)) and 0 <= value <= most
            for name, most in (
                ("num_draft_tokens", MAX_DRAFT_TOKENS),
                ("max_concurrency", MAX_CONCURRENCY),
                ("max_queued", MAX_CONCURRENCY),
                ("max_len", MAX_LEN),
                ("cache_block", MAX_LEN),
                ("undrafted_slots", MAX_CONCURRENCY),
            )
        }
        is_known = {name: isinstance(getattr(self, name), bool) for name in ("is_drafting", "has_prefix_cache")}
        for name, is_sound in {**texts, **numbers, **is_known}.items():
            if not is_sound:
                object.__setattr__(self, name, None)
