"""Received tensors are checked against their header."""

import pytest
from torch import Tensor

from dflash_runtime.errors import MISSING, InvalidHandoff
from dflash_runtime.kv_transfer import payload_bytes
from dflash_runtime.kv_transfer.payload_bytes import assemble, header_with_checksums
from dflash_testing.refusals import refuses
from dflash_testing.transfers import make_handoff


def test_damage_is_found_by_the_checksum() -> None:
    handoff = make_handoff("one", 0, 4)
    header = header_with_checksums(handoff)
    assemble(header, handoff.tensors)
    name = "draft"
    damaged = {**handoff.tensors, name: handoff.tensors[name] + 1}
    with refuses(InvalidHandoff, "damaged", field=f"tensors.{name}"):
        assemble(header, damaged)


def test_missing_and_misshapen_tensors_are_refused() -> None:
    handoff = make_handoff("one", 0, 4)
    header = header_with_checksums(handoff)
    draft = handoff.tensors["draft"]
    with refuses(InvalidHandoff, "missing-tensor", field="tensors.draft", found=MISSING):
        assemble(header, {name: tensor for name, tensor in handoff.tensors.items() if name != "draft"})
    for wrong in (draft.float(), draft[:1]):
        with refuses(InvalidHandoff, "misshapen-tensor", field="tensors.draft"):
            assemble(header, {**handoff.tensors, "draft": wrong})


def test_tensors_without_a_checksum_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors travel from GPU to GPU without a checksum, since computing it would copy them to the host."""

    def read(tensor: Tensor) -> int:
        raise AssertionError("read")

    monkeypatch.setattr(payload_bytes, "checksum", read)
    handoff = make_handoff("one", 0, 4)
    assemble(handoff.header, handoff.tensors)
