"""The prefix cache: full KV pages of committed tokens, found by their tokens.

A page's digest covers its tokens and the digest of the page before it. So equal digests mean equal texts from the first
token on. Target KV and draft context KV share page numbers, so a hit brings both and nothing is recomputed. At most
`len(tokens) - 1` tokens are matched, because the last token must run: its logits give the first anchor.

With recurrent layers a text continues from a snapshot of its state (`snapshots.py`), so a match ends at the last page
that has one.
"""

import hashlib
from array import array
from collections.abc import Iterable

from dflash_runtime.scheduling.pages import PagePool
from dflash_runtime.scheduling.related_texts import TOKEN_BYTES, RelatedTexts
from dflash_runtime.scheduling.request import Awaited, Request, SnapshotAt
from dflash_runtime.scheduling.snapshots import Lookup, SnapshotIndex

SHARED_WORTH_A_WAIT = 64
"""A prompt waits if a running request will soon publish this many more tokens of its prefix than the cache holds.
Prompts behind it in the queue may be admitted meanwhile."""


class PrefixCache:
    """The pages of one pair by digest. With `is_enabled` false it finds and publishes nothing.

    `snapshots` is the index of snapshots for a target with recurrent layers, otherwise None.
    """

    def __init__(self, pool: PagePool, *, is_enabled: bool = True, snapshots: SnapshotIndex | None = None) -> None:
        self.is_enabled = is_enabled
        self.snapshots = snapshots if is_enabled else None
        self._pool = pool
        self._pages: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._related = RelatedTexts(pool.page_size)
        self._worth_a_wait = max(1, SHARED_WORTH_A_WAIT // pool.page_size)  # pages
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._pages)

    def clear(self) -> None:
        """Forget every page and every request."""
        self._pages.clear()
        self._digests.clear()
        self._related = RelatedTexts(self._pool.page_size)
        if self.snapshots is not None:
            self.snapshots.clear()

    def expect(self, request: Request) -> None:
        """Note a new request, to find the pages that it has in common with others."""
        if self._is_open_to(request):
            self._related.add(request)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._related.remove(request)

    def match(self, request: Request) -> None:
        """Give a request the cached pages of the longest prefix of its tokens."""
        if not self._is_open_to(request):
            return
        size = self._pool.page_size
        most = (request.total_len - 1) // size
        request.pages = self._common_pages(request, most)
        piece = 1
        while len(request.pages) < most:
            end = min(most, len(request.pages) + piece)
            digests = page_digests(request, len(request.pages), end, size)
            found = list(map(self._pages.get, digests))
            request.pages += found[: found.index(None)] if None in found else found  # type: ignore[arg-type]
            if None in found:
                break
            piece *= 2
        if self.snapshots is not None:
            self._continue(request, self.snapshots, most)
        self._pool.share(request.pages)
        request.num_shared = request.num_published = len(request.pages)
        request.prefilled_len = request.num_published * size

    def finds_more(self, request: Request, num_pages: int) -> bool:
        """Whether a lookup would find more than `num_pages` pages of a request's text."""
        size = self._pool.page_size
        for column in range(num_pages, (request.total_len - 1) // size if self._is_open_to(request) else 0):
            page = self._pages.get(self._digest(request, column))
            if page is None or self.snapshots is None:
                return page is not None
            if self.snapshots.has(page):
                return True
        return False

    def publish(self, request: Request, num_tokens: int) -> None:
        """Publish the full pages within a request's first `num_tokens` rows of true KV.

        If the cache already has a page with the same text, the request's own page stays unpublished: published pages
        are never replaced.
        """
        if not self._is_open_to(request):
            return
        num_full = num_tokens // self._pool.page_size
        for column in range(request.num_published, num_full):
            digest = self._digest(request, column)
            if digest not in self._pages:
                page = request.pages[column]
                self._pool.publish(page)
                self._pages[digest] = page
                self._digests[page] = digest
        request.num_published = max(request.num_published, num_full)

    def keep(self, request: Request, snapshot: SnapshotAt) -> None:
        """Enter a snapshot of a request's text. The pages before its position must be published."""
        assert self.snapshots is not None
        page = self._pages.get(self._digest(request, snapshot.position // self._pool.page_size - 1))
        if page is None:
            self.snapshots.give_back(snapshot.slot)
            return
        restored = request.restored.position if request.restored is not None else 0
        below = max((position for position in request.keep_at if position < snapshot.position), default=restored)
        self.snapshots.keep(page, snapshot.slot, snapshot.position, below)

    def take_slots(self, request: Request, end: int) -> tuple[SnapshotAt, ...]:
        """Slots for the snapshots that a request keeps while it prefills up to `end`."""
        if self.snapshots is None:
            return ()
        keeps = []
        for position in sorted(request.keep_at):
            slot = self.snapshots.take() if request.prefilled_len < position <= end else None
            if slot is not None:
                request.keeping[position] = slot
                keeps.append(SnapshotAt(position, slot))
        return tuple(keeps)

    def enter_row(self, request: Request) -> None:
        """Give a request that got its row a slot for the states that its decode steps keep."""
        if self.snapshots is not None and self._is_open_to(request):
            request.spare = self.snapshots.take_spare()

    def leave_row(self, request: Request) -> None:
        """Take back the slots of a request, and keep the state at the last page boundary that it decoded past.

        Queued steps may have passed a later boundary unless the request has ended by itself or none is queued.
        """
        if self.snapshots is None:
            return
        for slot in request.keeping.values():
            self.snapshots.give_back(slot)
        request.keeping = {}
        if request.spare is None:
            return
        slot, request.spare = request.spare, None
        self.snapshots.num_spares -= 1
        position = request.kv_len // self._pool.page_size * self._pool.page_size
        is_known = request.num_in_flight == 0 if request.finish_reason is None else request.error is None
        if is_known and request.is_prefilled and position > request.prefill_len:
            self.keep(request, SnapshotAt(position, slot))
        else:
            self.snapshots.give_back(slot)

    def awaits(self, request: Request) -> bool:
        """Whether a request still waits for pages that a running request will soon publish. Reads no page."""
        relative, awaited = request.relative, request.awaited
        if awaited is None and relative is not None and relative.row is not None:
            awaited = self._awaited(request, relative, request.num_common)
        is_open = awaited is not None and self._is_coming(awaited)
        request.awaited = awaited if is_open else None
        return is_open

    def will_publish(self, running: Iterable[Request], waiting: Request) -> bool:
        """Whether a running request will soon publish much more of this prefix than the cache holds.

        Then `awaits` is true until it has done so, or stops.
        """
        size = self._pool.page_size
        column = waiting.num_published + self._worth_a_wait - 1
        if not self._is_open_to(waiting) or (column + 1) * size >= waiting.total_len:
            return False
        for item in running:
            # The pages of a common prefix help only with a snapshot at its end, which may still be to come.
            num_left = item.prefill_len // size if self.snapshots is not None else column + 1
            is_able = item.num_published < num_left and column < item.prefill_len // size
            if is_able and self._digest(item, column) == self._digest(waiting, column):
                awaited = self._awaited(waiting, item, self._num_equal(waiting, item, column + 1))
                if self._is_coming(awaited):
                    waiting.awaited = awaited
                    return True
        return False

    def check_integrity(self, running: Iterable[Request] = ()) -> None:
        """Assert that both maps agree and name published pages only, and that `running` hold the other slots."""
        assert {page: digest for digest, page in self._pages.items()} == self._digests
        assert all(self._pool.is_published(page) for page in self._digests)
        if self.snapshots is not None:
            assert all(page in self._digests for page in self.snapshots.pages)
            spares = [request.spare for request in running if request.spare is not None]
            assert len(spares) == self.snapshots.num_spares
            self.snapshots.check_integrity([*spares, *(slot for item in running for slot in item.keeping.values())])

    def _common_pages(self, request: Request, most: int) -> list[int]:
        """The pages that a request has in common with its relative, if other requests share exactly these."""
        num_common = min(request.num_common, most)
        if not num_common:
            return []
        last = self._pages.get(self._digest(request, num_common - 1))
        pages = self._pool.run_ending_with(last)
        assert len(pages) in (0, num_common)
        return list(pages)

    def _awaited(self, request: Request, publisher: Request, num_common: int) -> Awaited:
        size = self._pool.page_size
        num_pages = min(num_common, (request.total_len - 1) // size, publisher.prefill_len // size)
        return Awaited(publisher, publisher.generation, num_pages)

    def _is_coming(self, awaited: Awaited) -> bool:
        """Whether many of the awaited pages are still to be published."""
        item = awaited.publisher
        is_running = item.row is not None and item.generation == awaited.generation
        is_open = is_running and not (item.is_loading or item.is_private)
        if self.snapshots is not None:
            return is_open and item.num_published < awaited.num_pages and self._will_keep(item, awaited.num_pages)
        return is_open and item.num_published + self._worth_a_wait <= awaited.num_pages

    def _will_keep(self, publisher: Request, num_pages: int) -> bool:
        """Whether a request keeps a snapshot after these pages. If they are not scheduled yet, it is told to."""
        position = num_pages * self._pool.page_size
        if num_pages < self._worth_a_wait:
            return False
        if position > publisher.prefilled_len:
            publisher.keep_at.add(position)
        return position > publisher.prefilled_len or position in publisher.keeping

    def _num_equal(self, one: Request, other: Request, least: int) -> int:
        """How many pages two texts have in common, given that they have `least` in common."""
        size = self._pool.page_size
        most = min((one.total_len - 1) // size, other.prefill_len // size)
        while least < most:
            middle = (least + most + 1) // 2
            if self._digest(one, middle - 1) == self._digest(other, middle - 1):
                least = middle
            else:
                most = middle - 1
        return least

    def _is_open_to(self, request: Request) -> bool:
        return self.is_enabled and not request.is_private

    def _digest(self, request: Request, column: int) -> bytes:
        return page_digest(request, column, self._pool.page_size)

    def _continue(self, request: Request, snapshots: SnapshotIndex, most: int) -> None:
        """Cut a request's pages where its last snapshot is, and decide which snapshots its prompt keeps."""
        num_found, depth = len(request.pages), snapshots.depth(request.pages)
        del request.pages[depth:]
        size = self._pool.page_size
        if depth:
            request.restored = SnapshotAt(depth * size, snapshots.use(request.pages[-1]))
        planned = snapshots.policy(Lookup(num_found, depth, most))
        request.keep_at = {num_pages * size for num_pages in planned}

    def _forget(self, page: int) -> None:
        digest = self._digests.pop(page)
        del self._pages[digest]
        if self.snapshots is not None:
            self.snapshots.drop(page)


def page_digest(request: Request, column: int, page_size: int) -> bytes:
    """The digest of a request's full page, 16 bytes. It covers the page's tokens and the digest of the page before it.

    A text only grows, so each digest is computed once. Those of a relative are shared with it.
    """
    if request.relative is not None:
        _share_digests(request, request.relative, page_size)
    common, own = request.common_digests, request.page_digests
    start = request.num_common if common else 0
    if column < start:
        return common[column]
    for number in range(start + len(own), column + 1):
        before = own[-1] if own else common[start - 1] if common else b""
        tokens = _token_bytes(request, number * page_size, (number + 1) * page_size)
        own.append(hashlib.blake2b(tokens, key=before, digest_size=16).digest())
    return own[column - start]


def page_digests(request: Request, begin: int, end: int, page_size: int) -> list[bytes]:
    """The digests of the full pages `[begin, end)` of a request."""
    if begin == end:
        return []
    page_digest(request, end - 1, page_size)
    start = request.num_common if request.common_digests else 0
    own = request.page_digests[max(0, begin - start) : max(0, end - start)]
    return request.common_digests[begin : min(end, start)] + own if begin < start else own


def _share_digests(request: Request, relative: Request, page_size: int) -> None:
    """Let a request use its relative's list for the pages that both have in common."""
    request.relative = None
    page_digest(relative, request.num_common - 1, page_size)
    if relative.common_digests:
        relative.page_digests = relative.common_digests[: relative.num_common] + relative.page_digests
        relative.common_digests = []
    request.common_digests = relative.page_digests
    request.page_digests = request.page_digests[request.num_common :]  # a lookup may have computed some before


def _token_bytes(request: Request, start: int, end: int) -> bytes:
    if end <= request.prompt_len:
        return request.prompt_bytes[start * TOKEN_BYTES : end * TOKEN_BYTES]
    return array("q", request.token_slice(start, end)).tobytes()
