"""Answers that follow a grammar on a GPU, beside requests in captured steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.grammar import Grammar
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.grammars import LetterTokenizer, with_tokenizer
from dflash_testing.pairs import random_prompts
from timing.draft_kinds import KINDS, add_kinds, with_kind
from timing.engine_arms import engine_pair
from timing.pairs import build_pair
from timing.shapes import SHAPES

pytest.importorskip("llguidance")
pytestmark = pytest.mark.gpu

VOCAB = SHAPES["small"].vocab
LETTERS = LetterTokenizer("abcdefghijklmnopqrstuvwxyz", VOCAB)
PROMPTS = random_prompts([3, 17, 40, 90], VOCAB)
WORDS = Grammar("regex", "([a-m][n-z]){4,12}")
PARAMS = SamplingParams(max_new_tokens=40, grammar=WORDS, stop_token_ids=(LETTERS.stop_id,), seed=3)


@pytest.fixture(scope="module")
def pair() -> Any:
    return add_kinds(build_pair(SHAPES["small"], 512, torch.device("cuda", 0)), KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_follow_the_grammar_beside_captured_steps(kind: str, pair: Any) -> None:
    engine = engine_pair(with_kind(pair, kind, 8), kind, None, num_pages=400, max_model_len=512, max_num_requests=8)
    llm = with_tokenizer(LLM(engine), LETTERS)
    free = replace(PARAMS, grammar=None, ignore_eos=True)
    for temperature in (0.0, 0.9):
        params = [replace(item, temperature=temperature) for item in (*[PARAMS] * 4, *[free] * 4)]
        outputs = llm.generate([*PROMPTS, *PROMPTS], params)
        for output in outputs[:4]:
            assert output.error is None
            text = LETTERS.decode(output.token_ids)
            assert all((letter < "n") == (place % 2 == 0) for place, letter in enumerate(text))
            assert 8 <= len(text) <= 24
        assert llm.check_lossless(outputs[:4], params[0]).is_lossless or temperature
    llm.close()
