"""One file a dataset of prompts: where it is, which columns it has, and how projects make prompts of its rows."""
