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
    "gemma2": {**MIXED, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "gpt_oss": {**MIXED, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gemma4_text": {
        **MIXED,
        **{"global_head_dim": 16, "num_key_value_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        **{"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 97},
        "final_logit_softcapping": 2.0,
    },
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
    "cohere2_moe": {**MIXED, **EXPERTS, "logit_scale": 0.25, "first_k_dense_replace": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "exaone4": MIXED,
    "flex_olmo": EXPERTS,
    "flint": {**MIXED, **EXPERTS},
    "gemma": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    "granite_swa": {**MIXED, "attention_multiplier": 0.2, "logits_scaling": 3.0},
    "granitemoe": {"num_local_experts": 4, "logits_scaling": 3.0},
    "granitemoe_swa": {**MIXED, "num_local_experts": 4, "logits_scaling": 3.0},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": EXPERTS,
    "laguna": {**MIXED, **EXPERTS, "shared_expert_intermediate_size": 16},
    "mellum": {**MIXED, **EXPERTS},
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
    "vaultgemma": {**MIXED, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 1.0},
}
"""Model type -> what its config has beyond `BODY`. The first three are run by default, all in slow tests."""

DEFAULT = tuple(SERVED)[:3]


def make_model(path: Path, kind: str, **changes: Any) -> Any:
    """A random model of transformers, saved in a directory as safetensors."""
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(kind, **{**BODY, **SERVED.get(kind, {}), **changes})
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")) and parameter.ndim == 1:
                parameter.normal_(std=0.3)
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
