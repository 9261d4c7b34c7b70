"""`python -m dflash_cli`."""

from dflash_cli.main import main

if __name__ == "__main__":
    main()
