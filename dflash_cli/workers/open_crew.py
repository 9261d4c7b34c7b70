"""From what a user asked for to workers that are ready."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_cli.checkpoints.references import is_bundled
from dflash_cli.generation.answers import Answering
from dflash_cli.generation.loaded_pair import OpenedPair, load_session
from dflash_cli.terminal import console
from dflash_cli.workers.crew import Crew
from dflash_cli.workers.messages import WorkerSpec
from dflash_cli.workers.ray_start import joined, parse_workers
from dflash_runtime.config import EngineConfig
from dflash_runtime.errors import UsageError
from dflash_runtime.phrases import plural


@contextmanager
def open_answering(
    pair: OpenedPair, config: EngineConfig, workers: str | None, *, threads: int | None = None
) -> Iterator[Answering]:
    """Load the pair in this process, or, where `--workers` is given, in each of them."""
    if workers is None:
        yield load_session(pair, config, threads=threads)
        return
    with open_crew(pair, config, workers, threads=threads) as crew:
        yield crew


@contextmanager
def open_crew(pair: OpenedPair, config: EngineConfig, workers: str, *, threads: int | None = None) -> Iterator[Crew]:
    """Start the workers that `--workers` names and let each load the pair; they end with the block.

    Raises:
        UsageError: options that mean nothing for workers; and whatever starting and loading raise.
    """
    request = parse_workers(workers)
    if config.device_map is not None:
        raise UsageError("--device-map does not go with --workers, where each worker has one GPU")
    if config.device.startswith("cuda:"):
        raise UsageError(f"--device {config.device} does not go with --workers, where each worker has a GPU of its own")
    spec = WorkerSpec(
        draft=None if pair.draft is None else _reference(pair, "draft", pair.draft.checkpoint.path),
        target=_reference(pair, "target", pair.target.checkpoint.path),
        config=config,
        causality=pair.causality,
        template_options=pair.template_options,
        threads=threads,
    )
    with joined(request, config.device) as (cluster, count):
        with console.working(f"loading weights in {plural(count, 'worker')}"):
            crew = Crew(pair, cluster, spec, config, count)
        console.status(crew.summary())
        yield crew


def _reference(pair: OpenedPair, role: str, path: Path) -> str:
    """What names a checkpoint on every machine: the bundled one's name, the hub's with its commit, or a directory."""
    given, identity = pair.references[role] or "", pair.identities[role]
    if is_bundled(given):
        return given
    if identity.commit is not None and not Path(given).exists():
        return f"{identity.name}@{identity.commit}"
    return str(path.resolve())
