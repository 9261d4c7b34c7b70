"""Progress of the run level: the reading that is running, and the number of readings."""

from dflash_cli.terminal.progress import Meter


class ReadingProgress:
    """The `observe` callback of `search_readings` that shows a progress meter."""

    def __init__(self) -> None:
        self._meter: Meter | None = None

    def __enter__(self) -> "ReadingProgress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._meter is not None:
            self._meter.__exit__(*error)

    def __call__(self, name: str, index: int, total: int) -> None:
        """The reading called `name` is running; `index` of `total` scores are done. The total may change."""
        if self._meter is None:
            self._meter = Meter(total, "readings scored").__enter__()
        self._meter.expect(total)
        self._meter.update(index, name)
