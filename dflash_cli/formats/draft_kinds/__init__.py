"""Other kinds of drafts than DFlash: one file per kind, with its keys, its tensors and the engines that serve it."""
