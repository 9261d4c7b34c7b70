"""Arguments of the benchmarks: a shape, counts, and a device."""

import argparse
import sys
from dataclasses import replace

import torch

from timing.shapes import BLOCK, SHAPES, Shape


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `shape_of` reads."""
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument(
        "--block", type=int, choices=range(2, BLOCK + 1), default=BLOCK, metavar="ROWS",
        help=f"rows of a block, one more than the draft tokens, in both programs (default: {BLOCK})",
    )  # fmt: skip


def shape_of(given: argparse.Namespace) -> Shape:
    """The asked shape, with blocks of the asked number of rows."""
    return replace(SHAPES[given.shape], block=given.block)


def open_device(name: str) -> torch.device:
    """The device to measure on, made current. Ends the program if a CUDA device is missing."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device, or --device cpu with --shape small")
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    return device


def run_dtype(device: torch.device) -> torch.dtype:
    """The dtype of models on the device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def counts(text: str) -> list[int]:
    """Parse whole numbers separated by commas."""
    return [int(part) for part in text.split(",")]
