"""Rules of `dflash validate`, one decorated function each, in files by theme."""
