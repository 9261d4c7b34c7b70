"""The messages between rank 0 and the processes of the other ranks. Each is one line of JSON.

to a rank   content                           answer
RankSpec    the pair to load                  Joining, before the rank joins the group
WarmUp      steps to prepare
Run         requests to run
Stop        the last step of a run            Stopping, at once
Regrets     texts to compare with the target

After an error the process answers with a RankFailure and ends. It ends without an answer when rank 0 has ended.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_runtime.device.capacity.memory import is_out_of_memory
from dflash_runtime.documents import from_json, to_json
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CapacityError, DFlashError
from dflash_runtime.scheduling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """A draft to load: its folder and its canonical config.

    `names` says how tensors get canonical names: "split" by the config, "renamed" for weights in FP8, or "stored".
    """

    path: str
    config: DraftConfig
    names: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """Everything that a rank loads, and where it joins the others."""

    rank: int
    port: int
    target: str
    draft: DraftSpec | None
    config: EngineConfig
    num_threads: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """See `LLM.warm_up`."""

    params: tuple[SamplingParams, ...]
    max_requests: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """A checked request."""

    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Run:
    """Requests that all ranks run together."""

    requests: tuple[RankRequest, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """The last step of a run; see `engine.StopAt`."""

    run: int
    step: int


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its answer."""

    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Regrets:
    """Texts whose tokens are compared with the target's own choices; see `lossless.find_regrets`."""

    texts: tuple[Text, ...]


@dataclass(frozen=True, slots=True)
class Joining:
    """The rank has read the headers of the pair, and joins the group."""

    rank: int


@dataclass(frozen=True, slots=True)
class Stopping:
    """The rank knows the last step of its run."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a rank has ended."""

    message: str
    hint: str | None
    exit_code: int
    id: str

    @classmethod
    def of(cls, error: Exception) -> "RankFailure":
        if isinstance(error, DFlashError):
            return cls(error.message, error.hint, error.exit_code, error.id)
        text = str(error).strip().split("\n")[0]
        if is_out_of_memory(error):
            hint = "lower --concurrency or --max-batched-tokens, or use more GPUs"
            return cls(f"out of memory: {text}", hint, CapacityError.exit_code, "out-of-memory")
        return cls(f"{type(error).__name__}: {text}", None, DFlashError.exit_code, "rank-failed")

    def to_error(self, rank: int) -> DFlashError:
        """The error for rank 0 to raise."""
        error = DFlashError(f"rank {rank}: {self.message}", id=self.id, hint=self.hint)
        error.exit_code = self.exit_code
        return error


Message = RankSpec | WarmUp | Run | Stop | Regrets | Joining | Stopping | RankFailure

KINDS: Mapping[str, type[Message]] = {
    kind.__name__: kind for kind in (RankSpec, WarmUp, Run, Stop, Regrets, Joining, Stopping, RankFailure)
}


def to_line(message: Message) -> str:
    """A message as a line of JSON."""
    return json.dumps({"kind": type(message).__name__, "content": to_json(message)}) + "\n"


def from_line(line: str) -> Message:
    """The message of a line."""
    value: dict[str, Any] = json.loads(line)
    return from_json(KINDS[value["kind"]], value["content"])
