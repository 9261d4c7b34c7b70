"""The assistant of Muse Glimmer, as transformers saves it: converted, it computes what transformers' model computes."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from dflash_cli import validate
from dflash_cli.checkpoints.opening import open_draft
from dflash_kernels.suite import REFERENCE
from dflash_runtime.device.storage.kv import KVCache, PagedAttention
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.models.weights import stack_projections
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.pairs import placement, random_target

CONTEXT, BLOCK, MASK = 37, 6, 31


def test_a_saved_assistant_is_sound_and_converts_to_the_same_model(tmp_path: Path) -> None:
    target = random_target(num_layers=8)
    torch.manual_seed(5)
    model = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            hidden_size=target.config.hidden_size, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, target_layer_ids=[1, 4], block_size=BLOCK, mask_token_id=MASK,
        )
    ).eval()  # fmt: skip
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(tmp_path / "draft")
    report = validate(draft=str(tmp_path / "draft"), engine=("vllm", "sglang", "llama.cpp"))
    assert {item.id for item in report.findings if item.severity != "info"} == set()
    out = tmp_path / "out"
    shape = replace(support.SMALL, vocab=target.config.vocab_size, hidden=target.config.hidden_size, target_layers=8)
    written = support.make_target(tmp_path / "target", shape)
    done = invoke("convert", tmp_path / "draft", out, "--to", "native", "--target", written)
    assert done.code == 0, done.err

    config = open_draft(out).config
    assert (config.target_layer_ids, config.block_size, config.mask_token_id) == ((1, 4), BLOCK, MASK)
    assert (config.num_target_layers, config.vocab_size) == (8, target.config.vocab_size)
    assert (config.causal, config.windows) == ((False, False), (2048, 2048))
    draft = DFlashDraft(config, stack_projections(load_file(out / "model.safetensors").items()), target, placement())
    features = torch.randn(CONTEXT, config.num_taps * config.feature_size)
    block = torch.full((BLOCK,), MASK)
    block[0] = 5
    cache = KVCache(config, 1, CONTEXT, placement())
    with torch.inference_mode():
        draft.write_context(features, torch.arange(CONTEXT), cache, torch.arange(CONTEXT))
        attend = PagedAttention.in_order(REFERENCE, cache, CONTEXT, config.causal, config.windows)
        found = draft.logits(block[None], torch.arange(CONTEXT, CONTEXT + BLOCK)[None], attend)[0]
        hidden = model(noise_embeds=target.embedding[block][None], context_hidden_states=features[None], use_cache=True)
        wanted = hidden.last_hidden_state[0, 1:] @ target.head.plain.T
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
