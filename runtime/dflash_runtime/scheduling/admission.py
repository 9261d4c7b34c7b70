"""What an engine can ever run: the bounds that a request is held to before it is queued. Host only."""

from dflash_runtime.errors import CapacityError, RequestError
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.request import Request


def check_request(request: Request, limits: Limits, pages: PagePool) -> None:
    """Refuse what can never run.

    Raises:
        RequestError: a prompt this model cannot take.
        CapacityError: the request would not fit an empty pool.
    """
    if not request.prompt_token_ids:
        raise RequestError("empty, expected at least one token")
    worst = next((token for token in request.prompt_token_ids if not 0 <= token < limits.vocab_size), None)
    if worst is not None:
        raise RequestError(f"token id {worst}, expected ids in [0, {limits.vocab_size})")
    if request.prompt_len >= limits.max_model_len:
        raise RequestError(f"{request.prompt_len} tokens, expected fewer than the model's {limits.max_model_len}")
    longest = min(request.prompt_len + request.params.max_new_tokens, limits.max_model_len)
    needed = pages.pages_for(limits.reserved_len(longest))
    if needed > pages.num_pages - 1:
        raise CapacityError(
            f"needs {needed} KV pages of {pages.page_size} tokens for {longest} tokens and a "
            f"block of {limits.num_lookahead_tokens} more, but the pool has {pages.num_pages - 1}",
            hint="lower --max-new-tokens or --max-model-len, or give the KV cache more memory",
        )
