"""The entry point of `python -m dflash_cli` and of the installed commands."""

import signal


def main() -> None:
    """Run the command line. While `dflash_cli.main` is imported, Ctrl-C ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dflash_cli.main import main as run

    run()


if __name__ == "__main__":
    main()
