"""The work behind `dflash validate`: rules, what they see, what they report, readings that are tried."""
