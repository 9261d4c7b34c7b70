"""One file a format in which other programs take a measured acceptance."""
