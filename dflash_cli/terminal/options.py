"""Options that several verbs share, as bases of their request classes."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from dflash_cli.documents.atomic_file import check_output
from dflash_cli.terminal.parameters import DRAFTING, ENGINE, ESSENTIALS, MEASURING, OUTPUT, PROMPTS, Argument, Option
from dflash_cli.terminal.requests import Request, parameters_of
from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.errors import UnsupportedError, UsageError

REFERENCE = "A directory, a hub repository org/repo[@revision], or a bundled name"
DRAFT_HELP = f"{REFERENCE}: tiny, tiny:reduced, tiny:dflash2, tiny:dspark."
TARGET_HELP = f"{REFERENCE}: tiny."
PROMPTS_HELP = "Prompts as JSON Lines; each row has prompt, messages, turns or prompt_token_ids. - reads stdin."
DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
MAX_THREADS = 1024
"""The most threads. Processes that start very many threads crash."""

OTHER_DEVICES = ("meta", "mps", "xpu", "hpu", "xla", "mtia")
"""Devices of torch on which nothing runs here."""
CarrierName = Literal["file", "gloo", "nccl", "nixl"]
"""Transports of KV between the two engines of a disaggregated run."""


def parse_object(text: str) -> Mapping[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: the text is not a JSON object.
    """
    value = loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def values_of(request: Request, kind: type[Request]) -> dict[str, Any]:
    """Values of a request by name, for the options that the class `kind` declares."""
    return {item.name: getattr(request, item.name) for item in parameters_of(kind)}


def refuse_beside(request: Request, names: Sequence[str], because: str) -> None:
    """Refuse options that the user changed. `because` completes "does not go with ...".

    Raises:
        UsageError: naming the first changed option of these fields.
    """
    for item in request.changed():
        if item.name in names:
            raise UsageError(
                f"{item.title} does not go with {because}",
                id="options-exclude-each-other",
                field=item.title,
                found=getattr(request, item.name),
                hint=f"leave out {item.title}",
            )


@dataclass(frozen=True, kw_only=True)
class DraftOptions(Request):
    """The draft that a verb is about."""

    draft: Annotated[str, Argument(flag="--draft", short="-d", metavar="DRAFT", help=DRAFT_HELP)]


@dataclass(frozen=True, kw_only=True)
class TargetOptions(Request):
    """The target of the draft."""

    target: Annotated[
        str | None,
        Option(
            short="-t", metavar="TARGET", group=ESSENTIALS,
            help=f"{TARGET_HELP} Default: the target that the draft names.",
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PairOptions(TargetOptions):
    """A draft and its target; the bundled pair if neither is given."""

    draft: Annotated[
        str | None,
        Argument(flag="--draft", short="-d", metavar="DRAFT", help=f"{DRAFT_HELP} Default: tiny."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(Request):
    """How positions of a block attend to each other, and which of them predict a token."""

    causality: Annotated[
        Literal["causal", "non-causal", "layer-types"] | None,
        Option(
            group=DRAFTING,
            help="Attention inside a block, instead of the draft's config: to earlier positions (causal), to all "
            "(non-causal), or to earlier positions in sliding-window layers only (layer-types).",
        ),
    ] = None
    layout: Annotated[
        Literal["anchor-first", "fill-in"] | None,
        Option(
            group=DRAFTING,
            help="Layout of a DSpark block, instead of the draft's config. anchor-first: N rows draft N tokens. "
            "fill-in: N rows draft N - 1. Needed if the config states no layout.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PromptOptions(Request):
    """The prompts that a pair or a server answers."""

    prompts: Annotated[
        str | Path | Sequence[str | Sequence[int]] | None,
        Option(
            short="-p", metavar="FILE", group=ESSENTIALS, parse=str, is_setting=False,
            help=f"{PROMPTS_HELP} Default: the bundled prompts.",
        ),
    ] = None  # fmt: skip
    dataset: Annotated[
        str | None,
        Option(
            metavar="NAME", group=ESSENTIALS, is_setting=False,
            help="Prompts of a published dataset: gsm8k, math500, humaneval, mbpp, mt-bench or speed-bench. In full: "
            "NAME/SUBSET=SOURCE:N, where SOURCE is a folder, a file or a hub repository, for N prompts.",
        ),
    ] = None  # fmt: skip
    dataset_format: Annotated[
        str | None,
        Option(
            metavar="PROJECT", group=PROMPTS, is_setting=False,
            help="Make prompts from the dataset's rows as this project does: z-lab, vllm or specforge, for example. "
            "Default: z-lab; for speed-bench specdec-bench.",
        ),
    ] = None  # fmt: skip
    num_prompts: Annotated[
        int | None,
        Option(min=1, group=ESSENTIALS, help="Use a sample of N prompts. Default: all."),
    ] = None
    sample: Annotated[
        Literal["stratified", "head", "random"],
        Option(
            group=PROMPTS,
            help="How --num-prompts chooses: in proportion from each category, the first prompts, or at random.",
        ),
    ] = "stratified"
    max_new_tokens: Annotated[
        int, Option(short="-n", min=1, group=ESSENTIALS, help="Generate at most N tokens per prompt.")
    ] = 128
    chat: Annotated[
        bool | None,
        Option(
            flag="--chat", off="--raw", group=ESSENTIALS,
            help="Put prompts into the target's chat template, or continue them as plain text. Default: plain text; "
            "the template for datasets and the bundled chats.",
        ),
    ] = None  # fmt: skip
    thinking: Annotated[
        tuple[str, ...],
        Option(
            group=PROMPTS, metavar="on,off",
            help="Set the chat template's enable_thinking; on,off measures both side by side. If the template "
            'names it otherwise: --chat-template-kwargs {"NAME": "$thinking"}.',
        ),
    ] = ()  # fmt: skip
    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None,
        Option(
            metavar="JSON", group=PROMPTS, parse=parse_object, expected="a JSON object",
            help='Arguments of the chat template, such as {"custom_flag": false}.',
        ),
    ] = None  # fmt: skip

    @property
    def template_options(self) -> str | None:
        """`chat_template_kwargs` as JSON text."""
        return None if self.chat_template_kwargs is None else json.dumps(dict(self.chat_template_kwargs))

    @property
    def given_tools(self) -> Sequence[Mapping[str, Any]] | None:
        """The tools for the chat template, or None."""
        return None


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Request):
    """Where a pair runs."""

    device: Annotated[
        str,
        Option(metavar="DEVICE", group=ENGINE, is_setting=False, help="Run on this device: auto, cpu, cuda or cuda:N."),
    ] = "auto"
    target_runtime: Annotated[
        Literal["auto", "native", "transformers", "transformers-cache"],
        Option(
            group=ENGINE,
            help="native: this tool's code. transformers: Hugging Face's, slower. transformers-cache: the same with "
            "its own KV cache. auto: native where supported.",
        ),
    ] = "auto"
    device_map: Annotated[
        str | None,
        Option(
            metavar="MAP", group=ENGINE, is_setting=False,
            help="Split a target over several devices: auto, one device, or a JSON file of modules and devices. The "
            "target then runs through transformers and needs accelerate (extra: big).",
        ),
    ] = None  # fmt: skip
    threads: Annotated[
        int | None,
        Option(
            min=1, max=MAX_THREADS, group=ENGINE, is_setting=False,
            help="CPU threads. Default: 1 for a small pair, otherwise one per core.",
        ),
    ] = None  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.device.partition(":")[0] in OTHER_DEVICES:
            raise UnsupportedError(field="--device", found=self.device, expected="cpu or cuda")
        if not DEVICE.fullmatch(self.device):
            raise UsageError(field="--device", found=self.device, expected="auto, cpu, cuda or cuda:N")
        if self.device_map is not None and self.device_map.endswith(".json"):
            from dflash_cli.documents.reading import parse_object, read_input
            from dflash_runtime.engine_config import check_device_map

            path = Path(self.device_map)
            check_device_map(parse_object(read_input(path), self.device_map), path)


@dataclass(frozen=True, kw_only=True)
class VerdictOptions(Request):
    """The confidence of intervals that decide a comparison."""

    confidence: Annotated[
        float, Option(above=0.5, below=1, group=MEASURING, help="Confidence level of intervals and verdicts.")
    ] = 0.95


@dataclass(frozen=True, kw_only=True)
class IntervalOptions(Request):
    """The interval of a measured acceptance length."""

    confidence: Annotated[float, Option(above=0, below=1, group=MEASURING, help="Confidence level of intervals.")] = (
        0.95
    )
    num_resamples: Annotated[
        int, Option(min=0, group=MEASURING, help="Bootstrap resamples of the interval; 0 omits the interval.")
    ] = 10_000


@dataclass(frozen=True, kw_only=True)
class GateFileOptions(Request):
    """A file with the verdict of a gate, for CI."""

    gate_out: Annotated[
        Path | None,
        Option(
            is_per_run=True, metavar="FILE", group=OUTPUT, is_setting=False,
            help="Write the verdict of the gate to FILE as JUnit XML. An earlier FILE is replaced.",
        ),
    ] = None  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.gate_out is not None:
            check_output(self.gate_out, force=True)

    def require_gate(self, flag: str, *, is_given: bool) -> None:
        """Refuse --gate-out without a gate.

        Raises:
            UsageError: the option of the gate is not given.
        """
        if self.gate_out is not None and not is_given:
            raise UsageError(
                f"--gate-out writes the verdict of {flag}, which is missing", id="option-needs-another",
                field="--gate-out", hint=f"add {flag}",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GateOptions(GateFileOptions):
    """A threshold that the acceptance length must reach."""

    min_acceptance: Annotated[
        float | None,
        Option(above=0, group=ESSENTIALS, is_setting=False, help="Exit with 3 if the acceptance length is below X."),
    ] = None
    gate: Annotated[
        Literal["point", "lower"],
        Option(
            group=MEASURING, is_setting=False,
            help="Compare --min-acceptance with the acceptance length (point) or its interval's lower end (lower).",
        ),
    ] = "point"  # fmt: skip
    allow_failed: Annotated[
        bool,
        Option(
            is_per_run=True, group=MEASURING, is_setting=False,
            help="Exit with 0 if some prompts fail. They are listed, and left out of the result.",
        ),
    ] = False  # fmt: skip

    def check(self) -> None:
        super().check()
        self.require_gate("--min-acceptance", is_given=self.min_acceptance is not None)
        if self.gate != "point" and self.min_acceptance is None:
            raise UsageError(
                f"--gate {self.gate} says how --min-acceptance is compared, which is missing",
                id="option-needs-another", field="--gate", hint="add --min-acceptance X",
            )  # fmt: skip

    def verdict_of(self, command: str) -> AbstractContextManager[None]:
        """The context in which a command checks its gate, so that --gate-out has the verdict."""
        from dflash_cli.documents.junit import gate_written

        bound = "lower bound" if self.gate == "lower" else "acceptance length"
        return gate_written(self.gate_out, f"dflash {command}", f"{bound} of at least {self.min_acceptance}")


@dataclass(frozen=True, kw_only=True)
class ForceOptions(Request):
    """Whether files are replaced."""

    force: Annotated[
        bool, Option(is_per_run=True, group=OUTPUT, is_setting=False, help="Replace files that exist.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ResultOptions(ForceOptions):
    """A measured result that a verb writes in another form."""

    result: Annotated[Path, Argument(metavar="RESULT", help="A file that eval-acceptance --json has written.")]


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(ForceOptions):
    """Whether an interrupted run continues. The request class has `output`, the file or folder that keeps answers."""

    resume: Annotated[
        bool,
        Option(
            is_per_run=True,
            group=ESSENTIALS,
            is_setting=False,
            help="Continue an interrupted run: compute only what --output lacks.",
        ),
    ] = False

    def check(self) -> None:
        super().check()
        if self.resume and getattr(self, "output", None) is None:
            raise UsageError(
                "--resume needs --output, which names the answers to continue", id="resume-without-output",
                field="--resume", hint="add --output as in the interrupted run",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ResumableOptions(ResumeOptions):
    """A file that keeps finished answers, so that an interrupted run can continue."""

    output: Annotated[
        Path | None,
        Option(
            is_per_run=True, short="-o", metavar="FILE", group=ESSENTIALS, is_setting=False,
            help="Write each answer to FILE when it ends, as JSON Lines with tokens and steps.",
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RuleOptions(Request):
    """Which findings of rules make a command fail."""

    strict: Annotated[bool, Option(group=ESSENTIALS, help="Exit with 3 on warnings too.")] = False
    ignore: Annotated[tuple[str, ...], Option(metavar="ID,...", help="Skip rules with these ids.")] = ()


@dataclass(frozen=True, kw_only=True)
class FindingsFileOptions(ForceOptions):
    """A file of findings for CI."""

    output: Annotated[
        Path | None,
        Option(
            is_per_run=True, short="-o", metavar="FILE", group=ESSENTIALS, is_setting=False,
            help="Also write the findings to FILE: JUnit (.xml) or SARIF (.sarif).",
        ),
    ] = None  # fmt: skip
    format: Annotated[
        Literal["junit", "sarif"] | None,
        Option(
            is_per_run=True, group=OUTPUT, is_setting=False,
            help="The form of FILE; without --output, print this form instead of text. Default: by the suffix of FILE.",
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServedOptions(Request):
    """How an engine is told to draft."""

    num_speculative_tokens: Annotated[
        int | None,
        Option(
            short="-k", min=1, metavar="K", group=ESSENTIALS,
            help="Draft tokens per step that engines are told to use. Default: the draft's block size minus one.",
        ),
    ] = None  # fmt: skip
    tensor_parallel: Annotated[
        int,
        Option(min=1, group=ENGINE, help="Judge engines that split draft and target over N GPUs."),
    ] = 1


@dataclass(frozen=True, kw_only=True)
class LockOptions(Request):
    """A lock that the pair must match."""

    lock: Annotated[
        Path | None,
        Option(
            group=MEASURING, is_setting=False,
            help="Exit with 3 unless draft and target are pinned in FILE by dflash lock. Reads all bytes.",
        ),
    ] = None  # fmt: skip
