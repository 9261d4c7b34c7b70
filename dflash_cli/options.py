"""Options that several commands share, written once."""

from typing import Annotated, Literal

import typer

DType = Literal["auto", "float32", "bfloat16", "float64"]

DraftArg = Annotated[str, typer.Argument(metavar="DRAFT", help="Draft: a directory, org/repo[@rev], or tiny.")]
DraftOption = Annotated[
    str | None,
    typer.Option("--draft", "-d", metavar="REF", help="Draft: a directory, org/repo[@rev], tiny or tiny:reduced."),
]
TargetOption = Annotated[
    str | None,
    typer.Option("--target", "-t", metavar="REF", help="Target: a directory, org/repo[@rev], or tiny."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

PromptsOption = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        "-p",
        metavar="FILE",
        help="JSON Lines with prompt, messages, turns or prompt_token_ids; - reads stdin.",
    ),
]
MaxNewTokensOption = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens to generate a prompt.")]
KOption = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        min=0,
        metavar="K",
        help="Tokens to draft a step; the draft sees K + 1 rows. Default: the trained block less its anchor. "
        "0 decodes plainly.",
        show_default=False,
    ),
]
TemperatureOption = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option("--top-k", min=0, help="Sample from the k most likely tokens; 0 is all.")]
TopPOption = Annotated[float, typer.Option("--top-p", help="Sample from the most likely tokens that reach p.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of all sampling.")]
IgnoreEosOption = Annotated[bool, typer.Option("--ignore-eos", help="Go on past stop tokens.")]
StopTokenIdsOption = Annotated[
    list[int] | None, typer.Option("--stop-token-id", metavar="ID", help="A further id that ends a text; repeatable.")
]
ChatOption = Annotated[bool, typer.Option("--chat/--raw", help="Send prompts through the target's chat template.")]
TemplateOption = Annotated[
    str | None,
    typer.Option("--chat-template-kwargs", metavar="JSON", help='For the template, e.g. {"enable_thinking": false}.'),
]
DTypeOption = Annotated[
    DType, typer.Option("--dtype", help="Arithmetic; auto is bfloat16 on a GPU and float32 on the CPU.")
]
DeviceOption = Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")]
MaxNumRequestsOption = Annotated[int, typer.Option("--max-num-requests", min=1, help="Requests in a step at most.")]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option("--max-model-len", min=2, help="Prompt and output at most. Default: the pair's own limit."),
]
