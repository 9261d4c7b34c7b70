"""The context lengths that a draft names, from its config and its card."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.generation.context_marks import context_marks, trained_length


@pytest.mark.parametrize(
    ("card", "length"),
    [
        ("Trained on sequences of 1024 tokens.", 1024),
        ("Trained on sequences of up to 1,024 tokens.", 1024),
        ("Training sequences: 120000", None),
        ("## Training\n\n- lr 3e-4, max-length 3072, block-size 16", 3072),
        ("This model was trained with max_length 8192, on 4 nodes.", 8192),
        ("## Training details\n| max sequence length | 4,096 |", 4096),
        ("Training: sequence length of 4k", 4096),
        ("- Context length: 262,144 tokens", None),
        ("## Training\nmax_length 3072\nwhile another was trained with max_length 8192", None),
        ("## Training\nmax_length 3072\n## Usage\nmax_length=262144", 3072),
        ("Trained for 6 epochs on 1,000,000 rows.", None),
    ],
)
def test_a_card_states_the_training_length_in_lines_about_training(card: str, length: int | None) -> None:
    assert trained_length(card) == length


def test_marks_come_from_window_rope_positions_and_card(tmp_path: Path) -> None:
    shutil.copytree(tiny_directory() / "draft", tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    num_layers = config["num_hidden_layers"]
    layer_types = ["sliding_attention"] + ["full_attention"] * (num_layers - 1)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    path.write_text(
        json.dumps(
            config
            | {"layer_types": layer_types, "sliding_window": 128, "use_sliding_window": True, "rope_scaling": rope}
        )
    )
    (tmp_path / "draft" / "README.md").write_text("Trained on sequences of 320 tokens.")
    marks = context_marks(open_draft(tmp_path / "draft"))
    assert [(mark.num_tokens, mark.source) for mark in marks] == [
        (128, f"sliding_window of 1 of {num_layers} layers"),
        (320, "README.md"),
        (512, "original_max_position_embeddings"),
        (config["max_position_embeddings"], "max_position_embeddings"),
    ]
