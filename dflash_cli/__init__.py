"""The command line and the checkpoint library of dflash. Needs no GPU; imports nothing by itself."""

__version__ = "0.1.0"
