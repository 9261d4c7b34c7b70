"""One side of a disaggregated deployment in its own process: an engine with a small random pair.

The prefill side hands prompts off, and the decode side continues them. Both sides make the same pair and the same
prompts from a seed. `Peers(__name__)` starts peers with the arguments of `run_peer`.
"""

import random
import socket
import sys

from dflash_runtime.kv_transfer.connector import Connector
from dflash_runtime.kv_transfer.connector_locations import open_connector
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.transfers import HandoffPlan
from dflash_testing.faulty_connector import FaultyConnector
from dflash_testing.pairs import random_draft, random_llm, random_target
from dflash_testing.transfers import fork_peers

LOAD_SECONDS = 1.0
"""How long the decode side waits for a hand-off before it prefills the prompt itself."""


def make_llm(num_pages: int = 120) -> LLM:
    target = random_target(num_layers=2)
    draft = random_draft(target, target_layer_ids=(0, 1), num_layers=1, block_size=4)
    return random_llm(target, draft, 3, scheduling="async", max_num_requests=16, num_pages=num_pages)


def make_requests(num_prompts: int, seed: int) -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
    """Prompts of 1 to 60 tokens and their parameters: 1 to 12 new tokens, a third of them sampled.

    Some prompts share a prefix.
    """
    generator = random.Random(seed)
    beginning = tuple(generator.randrange(97) for _ in range(40))
    prompts, params = [], []
    for index in range(num_prompts):
        start = beginning[: generator.randrange(41)] if generator.random() < 0.4 else ()
        prompts.append(start + tuple(generator.randrange(97) for _ in range(generator.randint(1, 20))))
        temperature = generator.choice([0.0, 0.0, 0.9])
        params.append(SamplingParams(max_new_tokens=generator.randint(1, 12), temperature=temperature, seed=index))
    return prompts, params


def keys_of(num_prompts: int) -> tuple[str, ...]:
    return tuple(f"{index:05}" for index in range(num_prompts))


def run_side(llm: LLM, connector: Connector, role: str, num_prompts: int, seed: int) -> list[RequestOutput]:
    """Run all prompts of one side. The decode side prefills a prompt itself if its hand-off is late."""
    prompts, params = make_requests(num_prompts, seed)
    plan = HandoffPlan(
        connector=connector, keys=keys_of(num_prompts), is_sending=role == "prefill", timeout=LOAD_SECONDS
    )
    return llm.generate(prompts, params, handoffs=plan)


def open_side(location: str, role: str, seed: int, *, faults: bool) -> Connector:
    connector = open_connector(location, role, 60.0)  # type: ignore[arg-type]
    return FaultyConnector(connector, seed) if faults else connector


def run_peer(connection: socket.socket, location: str, role: str, num_prompts: int, seed: int, faults: bool) -> None:
    """Say `true` when the engine is ready, run all prompts of one side, and stay until `connection` is closed."""
    llm = make_llm()
    connection.sendall(b"true\n")
    connector = open_side(location, role, seed, faults=faults)
    run_side(llm, connector, role, num_prompts, seed)
    connection.recv(1)
    connector.close()


if __name__ == "__main__":
    fork_peers(int(sys.argv[1]), run_peer)
