"""Attention of blocks, trees and prompts over paged keys and values."""
