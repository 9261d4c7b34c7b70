"""Start the workers that `--workers` asks for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_cli.checkpoints.references import is_bundled
from dflash_cli.generation.answers import Answering
from dflash_cli.generation.loaded_pair import OpenedPair, load_session
from dflash_cli.terminal import console
from dflash_cli.terminal.progress import working
from dflash_cli.workers.crew import Crew
from dflash_cli.workers.messages import WorkerSpec
from dflash_cli.workers.ray_start import check_workers, joined
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.phrases import plural


@contextmanager
def open_answering(
    pair: OpenedPair, config: EngineConfig, workers: str | None, *, threads: int | None = None
) -> Iterator[Answering]:
    """Load the pair in this process or, with `--workers`, in each worker."""
    if workers is None:
        yield load_session(pair, config, threads=threads)
        return
    with open_crew(pair, config, workers, threads=threads) as crew:
        yield crew


@contextmanager
def open_crew(pair: OpenedPair, config: EngineConfig, workers: str, *, threads: int | None = None) -> Iterator[Crew]:
    """Start the workers of `--workers` and let each load the pair. They stop at the end of the block.

    Raises:
        UsageError: an option cannot be used with workers. Starting and loading raise further errors.
    """
    request = check_workers(workers, config)
    spec = WorkerSpec(
        draft=None if pair.draft is None else _reference(pair, "draft", pair.draft.checkpoint.path),
        target=_reference(pair, "target", pair.target.checkpoint.path),
        config=config,
        overrides=pair.overrides,
        template_options=pair.template_options,
        threads=threads,
    )
    with joined(request, config.device) as (cluster, count):
        with working(f"loading weights in {plural(count, 'worker')}"):
            crew = Crew(pair, cluster, spec, config, count)
        console.status(crew.summary())
        yield crew


def _reference(pair: OpenedPair, role: str, path: Path) -> str:
    """Return a checkpoint's name that is valid on every machine: bundled name, hub name with commit, or directory."""
    given, identity = pair.references[role] or "", pair.identities[role]
    if is_bundled(given):
        return given
    if identity.commit is not None and not Path(given).exists():
        return f"{identity.name}@{identity.commit}"
    return str(path.resolve())
