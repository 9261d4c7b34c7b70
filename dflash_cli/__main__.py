"""`python -m dflash_cli`, and what the installed commands call."""

import signal


def main() -> None:
    """Run the command line. Until `dflash_cli.main` is imported and answers Ctrl-C in words, it ends without any."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dflash_cli.main import main as run

    run()


if __name__ == "__main__":
    main()
