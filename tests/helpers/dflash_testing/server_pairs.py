"""Files of two servers: a sound pair, its changes, and a function that writes them."""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_testing import checkpoints as support

Json = dict[str, Any]
Change = Callable[[Json], None]

NIXL, MOONCAKE, MORIIO = "NixlConnector", "MooncakeConnector", "MoRIIOConnector"
SPECULATIVE, TRANSFER = "speculative_config", "kv_transfer_config"


@dataclass(frozen=True, kw_only=True)
class TransferCase:
    """A pair of servers that breaks one rule, made from a sound pair on which the rule is silent.

    at           location of the finding
    values       values that the finding's message states
    outcome      outcome of the verdict
    prefill, decode, both   changes of the sound pair's arguments
    shape        shape of the draft; the sound pair's draft has `sound_shape` if given
    target       changes of the target's config
    sound        change of both servers, in the sound pair too
    """

    rule: str
    at: str = ""
    values: tuple[str, ...] = ()
    engine: str = "vllm"
    severity: str = "error"
    outcome: str = "refused"
    prefill: Change | None = None
    decode: Change | None = None
    both: Change | None = None
    shape: support.Shape = support.SMALL
    target: Mapping[str, Any] = field(default_factory=dict)
    sound_shape: support.Shape | None = None
    sound: Change | None = None

    @property
    def name(self) -> str:
        return f"{self.rule}-{self.engine}-{self.at}"


def put(path: str, value: Any) -> Change:
    """Set a key, `a.b` within a; REMOVED takes it out."""

    def change(arguments: Json) -> None:
        *outer, last = path.split(".")
        for key in outer:
            arguments = arguments.setdefault(key, {})
        arguments.pop(last, None)
        if value is not support.REMOVED:
            arguments[last] = value

    return change


def all_of(*changes: Change) -> Change:
    def change(arguments: Json) -> None:
        for item in changes:
            item(arguments)

    return change


def over(name: str, **options: Any) -> Change:
    """Use a connector of vLLM."""
    return all_of(put(f"{TRANSFER}.kv_connector", name), put(f"{TRANSFER}.kv_connector_extra_config", options))


def arguments(engine: str, role: str, draft: Path, target: Path) -> Json:
    """A sound server of an engine, at the release that the engine's newest is."""
    if engine.partition("@")[0] == "sglang":
        return {
            "model_path": str(target),
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": str(draft),
            "speculative_num_draft_tokens": 4,
            "disaggregation_mode": role,
            "page_size": 16,
        }
    return {
        "model": str(target),
        SPECULATIVE: {"method": "dflash", "model": str(draft), "num_speculative_tokens": 3},
        TRANSFER: {"kv_connector": NIXL, "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role]},
    }


def make_models(folder: Path, shape: support.Shape, target: Mapping[str, Any]) -> Path:
    """A draft, a copy of it, another one of its shape, and their target; made once for a shape and a target's keys."""
    models = folder / f"{hash(shape)}-{hash(json.dumps(target))}"
    if not models.exists():
        support.make_native(models / "dflash-draft", shape)
        support.make_native(models / "copies" / "dflash-draft", shape)
        support.make_native(models / "dflash-other", replace(shape, taps=(1, 2)))
        support.make_target(models / "target", support.SMALL, **target)
    return models


def write_pair(case: TransferCase, folder: Path, models: Path, *, is_sound: bool = False) -> tuple[Path, Path]:
    """Write the two files of a case or of its sound pair. FOLDER in the files becomes the folder of the models."""
    shape = case.sound_shape if is_sound and case.sound_shape is not None else case.shape
    made = make_models(models, shape, {} if is_sound else case.target)
    files = []
    for role, own in (("prefill", case.prefill), ("decode", case.decode)):
        server = deepcopy(arguments(case.engine, role, made / "dflash-draft", made / "target"))
        changes = (case.sound,) if is_sound else (case.sound, case.both, own)
        for change in changes:
            if change is not None:
                change(server)
        files.append(folder / f"{role}.json")
        files[-1].write_text(json.dumps(server).replace("FOLDER", str(made)))
    return files[0], files[1]
