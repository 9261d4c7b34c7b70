"""Results for people to read: reports in several forms, and the part of a model card that is about them."""
