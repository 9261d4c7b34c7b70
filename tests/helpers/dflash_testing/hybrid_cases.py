"""Random targets with random drafts and engine settings, each drawn by a seed: hybrids, or of `random_families.py`.

The model is one of transformers' own. States of hybrids last for tens of tokens, so a fault in one changes the text.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.draft_config import ConvolutionConfig, MarkovConfig, SelectorConfig
from dflash_runtime.drafts.draft import Draft, Drawn, Draws, WalkingDraft, draft_places
from dflash_runtime.drafts.token_masks import TokenMasks
from dflash_runtime.models.layers import Attend, PagedKV
from dflash_runtime.models.target import Target
from dflash_runtime.models.target_loading import load_target
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.hosted_models import make_model
from dflash_testing.packed_models import pack_experts
from dflash_testing.pairs import placement, random_draft, random_prompts
from dflash_testing.random_families import FAMILIES, is_packed

Json = dict[str, Any]

BODY: Mapping[str, Sequence[Any]] = {
    "hidden_size": (16, 24, 32),
    "intermediate_size": (16, 40),
    "head_dim": (8, 16),
    "num_key_value_heads": (1, 2),
    "vocab_size": (61, 97, 130),
    "partial_rotary_factor": (0.25, 0.5, 1.0),
    "linear_num_key_heads": (1, 2, 3),
    "linear_key_head_dim": (4, 8, 12, 16),
    "linear_value_head_dim": (4, 8, 20),
    "linear_conv_kernel_dim": (2, 3, 4, 4, 5),
    "tie_word_embeddings": (False, True),
}
"""Keys of a target's config, each drawn on its own."""

ENGINE: Mapping[str, Sequence[Any]] = {
    "scheduling": ("sync", "async"),
    "max_num_requests": (1, 2, 3, 5),
    "max_batched_tokens": (1, 7, 24, 63, 64, 65, 200, 2048),
    "page_size": (4, 8, 16),
    "prefix_cache": (True, True, False),
}
"""Settings of an engine, each drawn on its own."""

PROMPT_LENGTHS = (1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 130)
"""Lengths around the number of taps, the ends of pages, and the ends of pieces of 64 rows."""

MODEL_LEN = 192


@dataclass(frozen=True)
class HybridCase:
    """A target's config, a draft's config, an engine, and prompts, all drawn by `seed`.

    num_drafts   K
    skill        the most right tokens that the draft is given per block. Each block draws its own number
    forced       preempt the youngest request after this many steps each time, or never
    is_short     whether the pool has few pages
    has_widths   whether each step verifies a random number of rows
    is_cut       whether the texts end at the last position of the model
    shared_lens  how many tokens each prompt has in common with one text, from its beginning
    """

    seed: int
    model_type: str
    body: Json
    draft: Json
    engine: Json
    num_drafts: int
    skill: int
    prompt_lengths: tuple[int, ...]
    num_tokens: int
    forced: int | None
    is_short: bool
    has_widths: bool
    is_cut: bool
    shared_lens: tuple[int, ...]
    params: tuple[SamplingParams, ...]

    @property
    def num_pages(self) -> int:
        """Room for every request, or for little more than the longest one."""
        page, rows = int(self.engine["page_size"]), self.num_drafts + 1
        needed = [-(-(length + self.num_tokens + 3 * rows) // page) for length in self.prompt_lengths]
        return 2 + (max(needed) + min(needed) if self.is_short else sum(needed))

    @property
    def model_len(self) -> int:
        """The longest text."""
        return max(self.prompt_lengths) + 8 if self.is_cut else MODEL_LEN

    def prompts(self) -> list[list[int]]:
        """The token ids of all prompts."""
        common, *own = random_prompts((MODEL_LEN, *self.prompt_lengths), self.body["vocab_size"], seed=self.seed)
        return [common[:count] + prompt[count:] for prompt, count in zip(own, self.shared_lens, strict=True)]


def draw_hybrid(chance: random.Random) -> tuple[str, Json]:
    """Draw a config of Qwen3.5."""
    body = {name: chance.choice(values) for name, values in BODY.items()}
    body["linear_num_value_heads"] = body["linear_num_key_heads"] * chance.choice((1, 2, 3))
    body["num_attention_heads"] = body["num_key_value_heads"] * chance.choice((1, 2))
    body["layer_types"] = draw_layers(chance)
    body["num_hidden_layers"] = len(body["layer_types"])
    return "qwen3_5_text", body


def draw_case(seed: int, family: str = "hybrid") -> HybridCase:
    """Draw a case. Cases of nearby seeds differ in everything. Texts of hybrids may be sampled."""
    chance = random.Random(f"{family} {seed}")
    model_type, body = FAMILIES.get(family, draw_hybrid)(chance)
    num_drafts = chance.choice((1, 2, 3, 4, 5, 6, 7, 8, 11, 15))
    count, num_tokens = chance.choice((2, 3, 4)), chance.choice((12, 20, 30))
    is_sampled = [chance.random() < 0.25 and family == "hybrid" for _ in range(count)]
    lengths = tuple(chance.choice(PROMPT_LENGTHS) for _ in range(count))
    is_shared = chance.random() < 0.5
    return HybridCase(
        seed=seed,
        model_type=model_type,
        body=body,
        draft=draw_draft(chance, body, num_drafts),
        engine={name: chance.choice(values) for name, values in ENGINE.items()},
        num_drafts=num_drafts,
        skill=chance.choice((0, 1, num_drafts, num_drafts, num_drafts)),
        prompt_lengths=lengths,
        num_tokens=num_tokens,
        forced=chance.choice((None, None, 3, 5)),
        is_short=chance.random() < 0.4,
        has_widths=chance.random() < 0.25,
        is_cut=chance.random() < 0.15,
        shared_lens=tuple(chance.choice((length, length - 1, length // 2)) * is_shared for length in lengths),
        params=tuple(
            SamplingParams(
                max_new_tokens=num_tokens, temperature=chance.choice((0.5, 1.0)) if sampled else 0.0,
                top_p=chance.choice((1.0, 0.9)), top_k=chance.choice((0, 20)), seed=index, ignore_eos=True,
            )
            for index, sampled in enumerate(is_sampled)
        ),
    )  # fmt: skip


def draw_layers(chance: random.Random) -> list[str]:
    """Two to six layers, at least one of each kind, in any order."""
    kinds = ["linear_attention", "full_attention"]
    kinds += [chance.choice((*kinds, kinds[0], kinds[0])) for _ in range(chance.randint(0, 4))]
    chance.shuffle(kinds)
    return kinds


def draw_draft(chance: random.Random, body: Json, num_drafts: int) -> Json:
    """Changes of `pairs.random_draft_config` for a draft of any family, with masks and a vocabulary of its own."""
    num_layers, depth = chance.choice((1, 2)), body["num_hidden_layers"]
    family = chance.choice(("dflash", "dflash", "dflash2", "dspark"))
    taps = sorted(chance.sample(range(depth - 1), chance.randint(1, min(3, depth - 1))))
    drawn: Json = {
        "family": family,
        "num_layers": num_layers,
        "target_layer_ids": tuple(taps),
        "block_size": num_drafts + 1 + chance.choice((0, 0, 2)),
        "causal": tuple(chance.random() < 0.5 for _ in range(num_layers)),
        "windows": tuple(chance.choice((None, None, 5, 24)) for _ in range(num_layers)),
    }
    if family == "dflash2":
        drawn["convolution"] = ConvolutionConfig(kernel_size=2, group_size=4)
        drawn["selector"] = SelectorConfig(rank=5, top_k=4)
    elif chance.random() < 0.4:
        drawn["draft_vocab_size"] = body["vocab_size"] // 2
    if family == "dspark":
        is_first = chance.random() < 0.5
        drawn["markov"] = MarkovConfig(rank=5, head_type=chance.choice(("vanilla", "gated", "rnn")))
        drawn["sample_from_anchor"] = is_first
        drawn["has_confidence"] = True
    return drawn


@dataclass(frozen=True)
class HybridPair:
    """The models of a case: transformers' own, the native target, and the draft without help."""

    model: Any
    target: Target
    draft: Draft

    def read(self, text: list[int]) -> tuple[Tensor, Tensor]:
        """See `plain_loop.Read`: one forward of transformers over the whole text, without a cache."""
        with torch.inference_mode():
            out = self.model(torch.tensor([text]), output_hidden_states=True, use_cache=False)
        taps = self.draft.config.target_layer_ids
        return out.logits[0], torch.cat([out.hidden_states[layer + 1][0] for layer in taps], dim=-1)


def make_pair(case: HybridCase, folder: Path) -> HybridPair:
    """Make the models of a case, and save the target in a folder."""
    model = make_model(folder, case.model_type, initializer_range=0.2, max_position_embeddings=MODEL_LEN, **case.body)
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(-3.0 + 2.0 * noise)
            elif parameter.ndim == 1:
                parameter.add_(0.2 * noise)
    model.save_pretrained(folder)
    if is_packed(case.model_type, case.body):
        pack_experts(folder, model)
    if hasattr(model, "set_experts_implementation"):  # the usual one requires aligned widths
        model.set_experts_implementation("eager")
    target = load_target(open_target(folder), placement(), "auto")
    draft = random_draft(target, seed=case.seed + 1, **case.draft)
    return HybridPair(model, target, draft)


class SteeredDraft:
    """A draft that begins each block with tokens of a known text. The other tokens are its own.

    It recognises a text by the anchor and its position, and draws the number of right tokens from them.
    """

    def __init__(self, draft: Draft, texts: Sequence[Sequence[int]], skill: int, vocab_size: int) -> None:
        self.config, self.target_ids, self._draft, self._skill = draft.config, draft.target_ids, draft, skill
        self._places = draft_places(draft, vocab_size)
        self._texts = {(position, token): text for text in texts for position, token in enumerate(text)}

    def write_context(self, features: Tensor, positions: Tensor, cache: PagedKV, slots: Tensor) -> None:
        self._draft.write_context(features, positions, cache, slots)

    def logits(self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int | None = None) -> Tensor:
        logits = self._draft.logits(block_ids, positions, attend, num_drafts)
        known = self._known(block_ids, positions, logits.shape[1])
        bonus = one_hot(known.clamp(min=0), logits.shape[-1]) * (known >= 0)[..., None]
        return logits + 1e4 * bonus.to(logits.dtype)

    def _known(self, block_ids: Tensor, positions: Tensor, num_drafts: int) -> Tensor:
        """The draft's ids [R, K] of known tokens, or -1."""
        rows = zip(block_ids[:, 0].tolist(), positions[:, 0].tolist(), strict=True)
        return torch.tensor([self._known_after(anchor, position, num_drafts) for anchor, position in rows])

    def _known_after(self, anchor: int, position: int, num_drafts: int) -> list[int]:
        text = self._texts.get((position, anchor), ())
        chance = random.Random(f"{anchor} at {position}")
        num_right = chance.choice((self._skill, *(chance.randint(0, self._skill) for _ in range(2))))
        ahead = [*text[position + 1 : position + 1 + min(num_right, num_drafts)]]
        ids = ahead if self._places is None else self._places[torch.tensor(ahead, dtype=torch.int64)].tolist()
        return [*ids, *[-1] * (num_drafts - len(ids))]


class SteeredWalkingDraft(SteeredDraft):
    """A `SteeredDraft` around a draft that walks. Known tokens replace the walk's tokens."""

    _draft: WalkingDraft

    def propose(
        self,
        block_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        num_drafts: int,
        draws: Draws | None,
        masks: TokenMasks | None = None,
    ) -> Drawn:
        drawn = self._draft.propose(block_ids, positions, attend, num_drafts, draws, masks)
        known = self._known(block_ids, positions, num_drafts)
        return drawn._replace(token_ids=torch.where(known >= 0, known, drawn.token_ids))

    def logits_along(self, block_ids: Tensor, positions: Tensor, attend: Attend, text: Tensor) -> Tensor:
        own = self._draft.propose(block_ids, positions, attend, text.shape[1], None).token_ids
        return self._draft.logits_along(block_ids, positions, attend, own)


def steer(draft: Draft, texts: Sequence[Sequence[int]], skill: int, vocab_size: int) -> Draft:
    """A draft that begins each block with up to `skill` tokens of known texts."""
    kind = SteeredWalkingDraft if isinstance(draft, WalkingDraft) else SteeredDraft
    return kind(draft, texts, skill, vocab_size)
