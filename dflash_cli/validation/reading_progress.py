"""How far the run level is: which reading is being tried, of how many."""

from dflash_cli.console import Meter


class ReadingProgress:
    """Takes what `run_search` observes and shows it; the number of readings is known with the first."""

    def __init__(self) -> None:
        self._meter: Meter | None = None

    def __enter__(self) -> "ReadingProgress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._meter is not None:
            self._meter.__exit__(*error)

    def __call__(self, name: str, index: int, total: int) -> None:
        """The reading called `name`, after `index` others, is being tried."""
        if self._meter is None:
            self._meter = Meter(total, "readings").__enter__()
        self._meter.update(index, name)
