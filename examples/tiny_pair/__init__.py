"""Helpers of `train_tiny_pair.py`: data, models, training, evaluation and packaging of the bundled pair."""
