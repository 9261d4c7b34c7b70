"""Fixtures for tests with peers: start other processes, and check that no thread or process hangs."""

from collections.abc import Iterator

import pytest

from dflash_testing.deadline import deadline
from dflash_testing.transfers import Peers, transfer_threads


@pytest.fixture(scope="session")
def peers() -> Iterator[Peers]:
    starter = Peers()
    yield starter
    starter.close()


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Fail a test that takes more than 120 s or leaves a connector thread behind."""
    with deadline(120):
        yield
        assert not transfer_threads()
