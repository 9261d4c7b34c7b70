"""One file per dataset of prompts: its repository, its columns, and how projects format its rows as prompts."""
