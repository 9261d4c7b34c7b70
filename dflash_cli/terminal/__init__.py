"""The terminal: the only writer to it, help pages and options, interruption, and facts about this installation."""
