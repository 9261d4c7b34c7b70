"""Mixtures of experts: the choice of experts, and their products with plain and packed weights."""
