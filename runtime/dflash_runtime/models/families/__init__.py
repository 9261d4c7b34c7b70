"""One file per family of targets that runs natively."""
