"""Statistics: acceptance lengths, proportions, their intervals and their differences."""
