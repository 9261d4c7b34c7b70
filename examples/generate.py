"""Generate with a pair from Python and stream tokens when they are committed.

python examples/generate.py                      the bundled pair
python examples/generate.py DRAFT TARGET         your own directories; the target needs a tokenizer
"""

import sys

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import Role, fetch_directory
from dflash_cli.generation.tokenizer import StreamDecoder, Tokenizer
from dflash_runtime.llm import LLM
from dflash_runtime.metrics import count_acceptance
from dflash_runtime.scheduling.sampling_params import SamplingParams


def main() -> None:
    """Complete one prompt and print the acceptance length."""
    draft_name, target_name = sys.argv[1:3] if len(sys.argv) > 2 else ("tiny", "tiny")
    target = open_target(fetch_directory(target_name, Role.TARGET))
    draft = open_draft(fetch_directory(draft_name, Role.DRAFT))
    tokenizer = Tokenizer(target.checkpoint.path)
    prompt = tokenizer.encode("import os\n\n\ndef read_lines(path):\n")
    decoder = StreamDecoder(tokenizer)
    with LLM(target, draft) as llm:
        for delta in llm.stream([prompt], SamplingParams(max_new_tokens=64)):
            print(decoder.push(delta.token_ids), end="", flush=True)
            if delta.output is not None:
                print(decoder.finish())
                counts = count_acceptance([delta.output], llm.num_draft_tokens)
                print(f"{counts.num_drafts} steps, acceptance length {counts.acceptance_len}", file=sys.stderr)


if __name__ == "__main__":
    main()
