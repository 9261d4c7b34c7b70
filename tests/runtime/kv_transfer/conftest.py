"""Other processes at the end of a connection, and that none leaves anything behind."""

from collections.abc import Iterator

import pytest

from dflash_testing.deadline import deadline
from dflash_testing.transfers import Peers, transfer_threads


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    starter = Peers()
    yield starter
    starter.close()


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No test takes longer than it should, and none leaves a thread behind."""
    with deadline(120):
        yield
        assert not transfer_threads()
