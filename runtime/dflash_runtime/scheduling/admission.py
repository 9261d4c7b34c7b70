"""Checks that a request can run at all, before it is queued. Host only."""

from collections.abc import Sequence

from dflash_runtime.errors import CapacityError, RequestError
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.request import Request

PROMPT = "prompt_token_ids"


def check_request(request: Request, limits: Limits, pages: PagePool) -> None:
    """Refuse a request that this engine can never run.

    Raises:
        RequestError: the model cannot take the prompt.
        CapacityError: the request would not fit an empty pool.
    """
    prompt = request.prompt_token_ids
    check_prompt(prompt, vocab_size=limits.vocab_size, max_model_len=limits.max_model_len)
    longest = min(len(prompt) + request.params.max_new_tokens, limits.max_model_len)
    needed = pages.pages_for(limits.reserved_len(longest))
    if needed > pages.num_pages - 1:
        raise CapacityError(
            f"needs {needed} KV pages of {pages.page_size} tokens for {longest} tokens and a "
            f"block of {limits.num_lookahead_tokens} more, but the pool has {pages.num_pages - 1}",
            id="request-exceeds-kv-pages", field="num_pages", found=needed,
            expected=f"at most {pages.num_pages - 1} pages",
            hint="lower --max-new-tokens or --max-model-len, or give the KV cache more memory",
        )  # fmt: skip


def check_prompt(prompt: Sequence[int], *, vocab_size: int, max_model_len: int | None = None) -> None:
    """Refuse a prompt that a model of this vocabulary and length cannot take. Without a length, any length is taken.

    Raises:
        RequestError: the prompt is empty, has a token outside the vocabulary, or is too long.
    """
    if not prompt:
        expected = "at least one token"
        raise RequestError(f"empty, expected {expected}", id="empty-prompt", field=PROMPT, found=(), expected=expected)
    worst = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if worst is not None:
        expected = f"ids in [0, {vocab_size})"
        raise RequestError(
            f"token id {worst}, expected {expected}",
            id="token-id-out-of-range", field=PROMPT, found=worst, expected=expected,
        )  # fmt: skip
    if max_model_len is not None and len(prompt) >= max_model_len:
        expected = f"fewer than the model's {max_model_len}"
        raise RequestError(
            f"{len(prompt)} tokens, expected {expected}",
            id="prompt-too-long", field=PROMPT, found=len(prompt), expected=expected,
        )  # fmt: skip
