"""Compare measured results of this tool and, through importers, of other programs."""
