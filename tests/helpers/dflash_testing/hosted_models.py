"""Small random models made by transformers' own classes, saved and opened as targets; and drafts that know their text.

They are made in float32 on the CPU. Their weights are wide enough for texts without ties and without loops.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.drafts.draft import Draft
from dflash_runtime.models.hosted import HostedTarget
from dflash_runtime.models.layers import Attend
from dflash_runtime.models.target import load_target
from dflash_testing.pairs import ScriptedDraft, placement

Json = dict[str, Any]

BODY: Json = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
EXPERTS: Json = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED: Json = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5}

SERVED: Mapping[str, Json] = {
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 24, "final_logit_softcapping": 2.0},
    "qwen3_moe": EXPERTS,
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {**MIXED, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "arcee": {},
    "bitnet": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**MIXED, "logit_scale": 0.25},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "exaone4": MIXED,
    "flex_olmo": EXPERTS,
    "gemma": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    "granitemoe": {"num_local_experts": 4, "logits_scaling": 3.0},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": EXPERTS,
    "minimax_m2": {**EXPERTS, "num_local_experts": 8},
    "mixtral": {"num_local_experts": 4},
    "nemotron": {},
    "olmo2": {},
    "olmo3": {**MIXED, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "olmoe": EXPERTS,
    "phi3": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
}
"""Model type -> what its config has beyond `BODY`. The first two are run by default, all in slow tests."""

DEFAULT = tuple(SERVED)[:2]


def make_model(path: Path, kind: str, **changes: Any) -> Any:
    """A random model of transformers, saved in a directory as safetensors."""
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(kind, **{**BODY, **SERVED.get(kind, {}), **changes})
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and parameter.ndim == 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(path)
    return model


MROPE: Json = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}}

WRAPPERS: Mapping[str, Json] = {
    "gemma3": {**MIXED, "query_pre_attn_scalar": 24},
    "qwen3_vl": MROPE,
    "mistral3": {"model_type": "mistral"},
    "glm4v": MROPE,
    "idefics3": {"model_type": "llama"},
    "internvl": {"model_type": "qwen2"},
    "llava": {"model_type": "llama"},
    "minimax_m3_vl": {},
    "qwen2_5_vl": MROPE,
    "qwen2_vl": MROPE,
    "qwen3_vl_moe": {**MROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "smolvlm": {"model_type": "llama"},
}
"""Model type of a multimodal model -> what its decoder's config has beyond `BODY`. The first two are run by default."""

VISION: Json = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "depth": 2,
    "num_heads": 2, "out_hidden_size": 32, "image_size": 28, "patch_size": 14, "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 16,
}  # fmt: skip


def make_wrapper(path: Path, kind: str) -> Any:
    """A random multimodal model of transformers, saved in a directory as safetensors."""
    from transformers import AutoConfig, AutoModelForImageTextToText, logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(kind, text_config={**BODY, **WRAPPERS[kind]}, vision_config=VISION)
    config.initializer_range = config.get_text_config(decoder=True).initializer_range = BODY["initializer_range"]
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(path)
    return model


def source_of(path: Path) -> TargetSource:
    return open_target(path)


def host(path: Path) -> HostedTarget:
    """The model of a directory, run by transformers' code."""
    target = load_target(open_target(path), placement(), "transformers")
    assert isinstance(target, HostedTarget)
    return target


def plain_text(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers' own greedy generation says after a prompt, stop tokens passed over."""
    from transformers import GenerationConfig

    model.generation_config.eos_token_id = None  # what the call leaves open is taken from here
    config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = torch.tensor([list(prompt)])
    said: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0].tolist()
    return said[len(prompt) :]


class WindowedAttention:
    """An `Attend` over the rows alone, written out, with each layer's window."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self._windows = windows

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        num_groups = query.shape[1] // keys.shape[1]
        keys, values = (item.repeat_interleave(num_groups, dim=1) for item in (keys, values))
        back = torch.arange(len(query))[:, None] - torch.arange(len(query))
        window = self._windows[layer]
        is_seen = (back >= 0) & (back < (window or len(query)))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[-1] ** -0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~is_seen, -torch.inf).softmax(-1), values)

    read = __call__

    def place(self, layer: int) -> None:
        return None


@dataclass(frozen=True)
class Known:
    """A text of which a draft proposes the first `num_right` tokens of each block rightly, and the rest wrongly."""

    token_ids: Sequence[int]
    num_right: int


class KnowingDraft(ScriptedDraft):
    """Proposes the texts that it knows, whichever is being said, as far as it may."""

    def __init__(self, draft: Draft, known: Sequence[Known]) -> None:
        super().__init__(draft, lambda position: 0)
        self._texts = {(position, token): item for item in known for position, token in enumerate(item.token_ids)}

    def logits(self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int | None = None) -> Tensor:
        rows = zip(block_ids[:, 0].tolist(), positions.tolist(), strict=True)
        drafted = torch.tensor([self._propose(anchor, *row) for anchor, row in rows])
        return one_hot(drafted, self.config.vocab_size).float()[:, :num_drafts]

    def _propose(self, anchor: int, position: int, *ahead: int) -> list[int]:
        known = self._texts.get((position, anchor), Known((), 0))
        right = [known.token_ids[at] if at < len(known.token_ids) else 0 for at in ahead]
        is_right = [index < known.num_right for index in range(len(ahead))]
        return [token if keep else (token + 1) % 7 for token, keep in zip(right, is_right, strict=True)]
