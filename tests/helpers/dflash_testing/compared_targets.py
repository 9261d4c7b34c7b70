"""A native target beside transformers' model with the same weights, and runs that must give the text of this model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.device.text_pages import read_features
from dflash_runtime.drafts.draft import Draft
from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.handoffs import go_on, hand_off
from dflash_testing.hosted_models import KnowingDraft, Known, plain_text
from dflash_testing.pairs import placement, random_draft, random_llm, random_prompts
from dflash_testing.plain_loop import WholeText, plain_loop

NUM_DRAFTS, NUM_TOKENS = 7, 14
PARAMS = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
LENGTHS = (1, 2, 17, 33, 70)


@dataclass(frozen=True)
class ComparedTarget:
    """A model of transformers, and the same model as a native target. `sizes` are settings of random drafts."""

    model: Any
    target: Target
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def prompts(self, *lengths: int) -> list[list[int]]:
        return random_prompts(lengths, self.target.config.vocab_size)

    def texts(self, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
        return [plain_text(self.model, prompt, num_tokens) for prompt in prompts]

    def draft(self, known: list[Known] | None = None) -> Draft:
        draft = random_draft(self.target, rope=RopeConfig(theta=10_000.0), **self.sizes)
        return draft if known is None else KnowingDraft(draft, known)

    def check_preempted_requests(self, scheduling: str) -> None:
        """Require that preempted requests begin again and give the text."""
        given = self.prompts(20, 21, 22, 23)
        llm = random_llm(
            self.target, self.draft(), NUM_DRAFTS,
            max_num_requests=4, page_size=4, num_pages=30, scheduling=scheduling,
        )  # fmt: skip
        outputs = llm.generate(given, PARAMS)
        assert [list(output.token_ids) for output in outputs] == self.texts(given)
        assert any(output.num_preemptions for output in outputs)

    def check_repeated_prompt(self) -> None:
        """Require that the second answer to a prompt reads two cached pages and is the text."""
        (prompt,) = self.prompts(48)
        llm = random_llm(self.target, self.draft(), NUM_DRAFTS)
        outputs = [llm.generate([prompt], PARAMS)[0] for _ in range(2)]
        assert [list(output.token_ids) for output in outputs] == self.texts([prompt]) * 2
        assert [output.num_cached for output in outputs] == [0, 32]

    def check_handed_requests(self, scheduling: str) -> None:
        """Require that requests go on in another engine with the drafts and texts of one engine."""
        given = self.prompts(*LENGTHS)
        one, sender, receiver = (
            random_llm(self.target, self.draft(), NUM_DRAFTS, scheduling=scheduling, max_num_requests=3)
            for _ in range(3)
        )
        wanted = one.generate(given, PARAMS)
        found = go_on(receiver, given, PARAMS, hand_off(sender, given, PARAMS))
        assert [(item.token_ids, item.drafts) for item in found] == [(item.token_ids, item.drafts) for item in wanted]
        assert [item.num_loaded for item in found] == list(LENGTHS)

    def check_layer_outputs(self) -> None:
        """Require that every layer except the last has the same output as in transformers."""
        (text,) = self.prompts(150)
        layers = range(self.target.config.num_layers - 1)
        with torch.no_grad():
            out = self.model(torch.tensor([text]), output_hidden_states=True, use_cache=False)
        wanted = torch.cat([out.hidden_states[layer + 1][0] for layer in layers], dim=-1)
        found = read_features(self.target, placement(), 16, text, list(layers))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)

    def check_steps(self, engine: Mapping[str, Any]) -> None:
        """Require the steps of a loop over transformers' own model.

        Drafted tokens follow from the features of this model, and accepted ones from its text.
        """
        prompts, draft = self.prompts(3, 21), self.draft()
        reader = WholeText(self.model, self.target.config)
        wanted = [plain_loop(reader, draft, prompt, 3, 9) for prompt in prompts]
        llm = random_llm(self.target, draft, 3, max_num_requests=2, **engine)
        found = llm.generate(prompts, replace(PARAMS, max_new_tokens=9))
        for output, (text, steps) in zip(found, wanted, strict=True):
            assert list(output.token_ids) == text[:9]
            own = [(step.draft_ids, step.num_accepted) for step in output.drafts[:-1]]
            assert own == steps[: len(output.drafts) - 1]
