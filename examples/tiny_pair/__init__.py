"""Helpers of `train_tiny_pair.py`: data, models, training, evaluation and packaging."""
