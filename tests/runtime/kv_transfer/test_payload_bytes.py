"""What came is held against its header."""

import pytest
from torch import Tensor

from dflash_runtime.errors import InvalidHandoff
from dflash_runtime.kv_transfer import payload_bytes
from dflash_runtime.kv_transfer.payload_bytes import check_tensors, header_with_checksums
from dflash_testing.transfers import make_handoff


def test_damage_is_found_by_the_checksum() -> None:
    handoff = make_handoff("one", 0, 4)
    header = header_with_checksums(handoff)
    check_tensors(header, handoff.tensors)
    name = "draft"
    damaged = {**handoff.tensors, name: handoff.tensors[name] + 1}
    with pytest.raises(InvalidHandoff, match=f"tensors.{name}: damaged"):
        check_tensors(header, damaged)


def test_without_a_checksum_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that travel from GPU to GPU have none: to make one is to copy all of them to the host."""

    def read(tensor: Tensor) -> int:
        raise AssertionError("read")

    monkeypatch.setattr(payload_bytes, "checksum", read)
    handoff = make_handoff("one", 0, 4)
    check_tensors(handoff.to_header(), handoff.tensors)
