"""Options that several commands share, written once: single ones as annotations, sets of them as groups.

A command takes a group as one parameter; `parameters` shows the group's fields in its place.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from dflash_cli.terminal.parameters import DRAFTING, ENGINE, ESSENTIALS, MEASURING, OUTPUT, SAMPLING, parse_size
from dflash_runtime.config import EngineConfig
from dflash_runtime.scheduling.request import SamplingParams

DRAFT_HELP = "Draft: a directory, a hub repository org/repo[@revision], or a bundled one: tiny, tiny:reduced."

DraftArg = Annotated[str, typer.Argument(metavar="DRAFT", help=DRAFT_HELP)]
OptionalDraftArg = Annotated[str | None, typer.Argument(metavar="DRAFT", help=f"{DRAFT_HELP} Default: tiny.")]
DraftOption = Annotated[
    str | None,
    typer.Option("--draft", "-d", metavar="DRAFT", help=f"{DRAFT_HELP} Default: tiny.", rich_help_panel=ESSENTIALS),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        metavar="TARGET",
        help="Target: a directory, a hub repository org/repo[@revision], or the bundled one: tiny. Default: the target "
        "that the draft names.",
        rich_help_panel=ESSENTIALS,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of text.", rich_help_panel=OUTPUT)
]
PromptsOption = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        "-p",
        metavar="FILE",
        help="JSON Lines, each with prompt, messages, turns or prompt_token_ids; - reads stdin.",
        rich_help_panel=ESSENTIALS,
    ),
]
DatasetOption = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        metavar="NAME",
        help="Prompts of a published dataset: gsm8k, math500, humaneval, mbpp, mt-bench or speed-bench, as "
        "NAME[/SUBSET][=PLACE][:N]. PLACE is a folder, a file or a hub repository; N is how many.",
        rich_help_panel=ESSENTIALS,
    ),
]
DatasetFormatOption = Annotated[
    str | None,
    typer.Option(
        "--dataset-format",
        metavar="PROJECT",
        help="Make prompts of the dataset's rows as this project does, such as z-lab, vllm or specforge. Default: "
        "z-lab, or for speed-bench specdec-bench.",
        rich_help_panel=MEASURING,
    ),
]
CausalityOption = Annotated[
    Literal["causal", "non-causal", "layer-types"] | None,
    typer.Option(
        "--causality",
        help="Overrule the draft's config: each position of a block attends to earlier ones only (causal), to all "
        "(non-causal), or to earlier ones only in sliding-window layers (layer-types).",
        show_default=False,
        rich_help_panel=DRAFTING,
    ),
]
MaxNewTokensOption = Annotated[
    int,
    typer.Option(
        "--max-new-tokens",
        "-n",
        min=1,
        metavar="N",
        help="Generate at most N tokens for each prompt.",
        rich_help_panel=ESSENTIALS,
    ),
]
ChatOption = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Wrap each prompt in the target's chat template, or continue it as plain text (for base models). Default: "
        "plain text, but for datasets and mix-64 the template where there is one.",
        show_default=False,
        rich_help_panel=ESSENTIALS,
    ),
]
TemplateOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        help='Arguments of the chat template, such as {"enable_thinking": false}.',
        rich_help_panel=SAMPLING,
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        metavar="N",
        help="CPU threads to use. Default: 1 for a small pair, otherwise one for each core this process may use.",
        rich_help_panel=ENGINE,
    ),
]
WorkersOption = Annotated[
    str | None,
    typer.Option(
        "--workers",
        metavar="N",
        help="Spread the prompts over N processes, one for each GPU, or over a Ray cluster: auto or ray://host:port, "
        "with #N for so many workers. A lost worker's prompts are asked again. Needs ray (extra: ray).",
        rich_help_panel=ENGINE,
    ),
]
TargetRuntimeOption = Annotated[
    Literal["auto", "native", "transformers", "transformers-cache"],
    typer.Option(
        "--target-runtime",
        help="Whose code runs the target: this runtime's (native), or transformers', which is slow: over the same KV "
        "pages where these do, otherwise, or always (transformers-cache), with its own cache, one request after "
        "another. auto is native where it serves the target's model type, transformers otherwise.",
        rich_help_panel=ENGINE,
    ),
]
DeviceMapOption = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        metavar="MAP",
        help="Spread a target that is too large for one GPU: auto (over all GPUs and the host's memory), one device, "
        "or a JSON file of modules and devices. It runs through transformers then, and needs accelerate (extra: big).",
        rich_help_panel=ENGINE,
    ),
]
LockOption = Annotated[
    Path | None,
    typer.Option(
        "--lock",
        metavar="FILE",
        help="Exit with 3 unless draft and target are those that dflash lock wrote to FILE; reads every byte of them.",
        rich_help_panel=MEASURING,
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace files that already exist.", rich_help_panel=OUTPUT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen."""

    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            min=0.0,
            metavar="X",
            help="Sampling temperature; 0 always takes the most likely token.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k",
            min=0,
            metavar="N",
            help="Sample from the N most likely tokens only; 0 means all.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            metavar="X",
            help="Sample from the smallest set of most likely tokens whose probabilities add up to X.",
            rich_help_panel=SAMPLING,
        ),
    ] = 1.0
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, max=2**63 - 1, metavar="N", help="Seed for sampling.", rich_help_panel=SAMPLING),
    ] = 0
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Keep generating past stop tokens.", rich_help_panel=SAMPLING)
    ] = False
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(
            "--stop-token-id",
            min=0,
            metavar="ID",
            help="Another token id that ends an answer; may be repeated.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    verify_width: Annotated[
        int | None,
        typer.Option(
            "--verify-width",
            min=1,
            metavar="N",
            help="Verify only the first N positions of each block, counting the last committed token as the first. The "
            "draft still fills the whole block; with 1 it is not run. Default: all K + 1 positions.",
            rich_help_panel=DRAFTING,
        ),
    ] = None

    def params(self, max_new_tokens: int) -> SamplingParams:
        """The runtime's form."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_id or ()),
            ignore_eos=self.ignore_eos,
            verify_width=self.verify_width,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the engine runs."""

    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            min=0,
            metavar="K",
            help="Tokens to draft in each step. A block is the last committed token and K drafted ones, so the "
            "maximum, and the default, is the draft's block size minus one. 0 runs the target without a draft.",
            rich_help_panel=DRAFTING,
        ),
    ] = None
    draft_sampling: Annotated[
        Literal["greedy", "probabilistic"],
        typer.Option(
            "--draft-sampling",
            help="Draft the most likely tokens (greedy), or sample them and accept each so that the target's "
            "distribution is kept (probabilistic).",
            rich_help_panel=DRAFTING,
        ),
    ] = "greedy"
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="DEVICE", help="Device to run on: auto, cpu, cuda or cuda:N.", rich_help_panel=ENGINE
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float64"],
        typer.Option(
            "--dtype",
            help="Number format of the models; auto is bfloat16 on a GPU and float32 on the CPU.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "triton", "reference"],
        typer.Option(
            "--kernels",
            help="Kernels to run; auto is triton on a GPU and reference on the CPU.",
            rich_help_panel=ENGINE,
        ),
    ] = "auto"
    target_runtime: TargetRuntimeOption = "auto"
    device_map: DeviceMapOption = None
    max_num_requests: Annotated[
        int,
        typer.Option(
            "--max-num-requests",
            "--max-num-seqs",
            min=1,
            metavar="N",
            help="Run at most N requests together.",
            rich_help_panel=ENGINE,
        ),
    ] = 16
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            min=2,
            metavar="N",
            help="Most tokens that a prompt and its answer may have together. Default: as many as the pair allows.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    max_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-batched-tokens",
            "--max-num-batched-tokens",
            min=1,
            metavar="N",
            help="Rows of a step that reads prompts, at most: of these and of requests that decode beside them. "
            "Default: 8192 on a GPU, 2048 on a CPU.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    page_size: Annotated[
        int,
        typer.Option(
            "--page-size", min=1, metavar="N", help="Tokens in each page of the KV cache.", rich_help_panel=ENGINE
        ),
    ] = 16
    kv_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-memory",
            metavar="SIZE",
            help="Memory for the KV cache, such as 512M or 20G, in units of 1,024. Default: what is free.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(
            "--gpu-memory-utilization", metavar="X", help="Fraction of the GPU's memory to use.", rich_help_panel=ENGINE
        ),
    ] = 0.9
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Reuse the KV cache of prompts that begin with the same tokens.",
            rich_help_panel=ENGINE,
        ),
    ] = True
    prefix_store: Annotated[
        str | None,
        typer.Option(
            "--prefix-store",
            metavar="DIR",
            help="Keep the KV of prompts in DIR, and begin prompts of later runs of the same pair with it.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    scheduling: Annotated[
        Literal["async", "sync"],
        typer.Option(
            "--scheduling",
            help="Queue steps before earlier ones have returned (async), or wait for each (sync).",
            rich_help_panel=ENGINE,
        ),
    ] = "async"
    graphs: Annotated[
        bool,
        typer.Option(
            "--graphs/--no-graphs",
            help="Capture steps as CUDA graphs, which take less time to start.",
            rich_help_panel=ENGINE,
        ),
    ] = True

    def config(self) -> EngineConfig:
        """The runtime's form."""
        return EngineConfig(
            device=self.device,
            dtype=self.dtype,
            kernels=self.kernels,
            target_runtime=self.target_runtime,
            device_map=self.device_map,
            num_draft_tokens=self.num_speculative_tokens,
            draft_sampling=self.draft_sampling,
            max_model_len=self.max_model_len,
            max_num_requests=self.max_num_requests,
            max_batched_tokens=self.max_batched_tokens,
            page_size=self.page_size,
            kv_memory_bytes=parse_size(self.kv_memory, "--kv-memory") if self.kv_memory is not None else None,
            gpu_memory_utilization=self.gpu_memory_utilization,
            prefix_cache=self.prefix_cache,
            prefix_store=self.prefix_store,
            scheduling=self.scheduling,
            graphs=self.graphs,
        )
