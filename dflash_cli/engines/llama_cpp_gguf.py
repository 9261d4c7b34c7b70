"""llama.cpp: rules on a draft in a GGUF file. The rules on fields of all dialects judge it too, by the keys of GGUF."""

from collections.abc import Iterator

from dflash_cli.formats.fields import REMOVED, look_up
from dflash_cli.formats.gguf import WRITTEN, Gguf
from dflash_cli.formats.gguf_fields import ARCHITECTURE_KEY, CAUSAL, MASK, PATTERN, TAPS, TOKENS, WINDOW
from dflash_cli.formats.gguf_relatives import GgufRelative
from dflash_cli.rules.rule import FIX_COPY, Problem, check
from dflash_cli.rules.subject import WEIGHTS, Subject
from dflash_runtime.checkpoint.stored.gguf import DRAFTS
from dflash_runtime.errors import MISSING
from dflash_runtime.json_values import is_int

NAME = "llama.cpp"
LOADER = "ggml-org/llama.cpp src/models/dflash.cpp"
FIX_CONVERT = "convert the draft again from safetensors: dflash convert SRC {out} --to gguf"

FORMER_KEYS = {
    "dflash.mask_token_id": MASK,
    "dflash.sliding_window_pattern": PATTERN,
    "dflash.sliding_window": WINDOW,
    "dflash.causal": CAUSAL,
}
"""Key of early builds and forks -> the key that llama.cpp reads."""


@check(
    "G01",
    effect="current llama.cpp builds do not know the architecture and stop",
    fix=FIX_CONVERT,
    source="ggml-org/llama.cpp#25116",
    stage="identity",
)
def architecture_is_current(subject: Subject) -> Iterator[Problem]:
    """general.architecture of a GGUF draft is dflash, the name that llama.cpp loads."""
    found = look_up(subject.config, ARCHITECTURE_KEY)
    if type(subject.format) is Gguf and found != WRITTEN:
        yield Problem(subject.location(ARCHITECTURE_KEY), f"found {found!r}, expected {WRITTEN!r}: {DRAFTS[found]}")


@check(
    "G02",
    effect="llama.cpp stops at a window without its layers, and gives every layer full attention without a window",
    fix=FIX_CONVERT,
    source=f"{LOADER}; ggml-org/llama.cpp#27342",
)
def windows_are_whole(subject: Subject) -> Iterator[Problem]:
    """A GGUF draft states the window and the layers that have it, or neither.

    sliding_window_pattern has an entry for each layer. Converters write both keys only if use_sliding_window is true.
    """
    if not _is_gguf(subject):
        return
    window, pattern = look_up(subject.config, WINDOW), look_up(subject.config, PATTERN)
    count = subject.stated.body.get("num_hidden_layers")
    has_window = window not in (MISSING, 0)
    if has_window and pattern is MISSING:
        yield Problem(subject.location(PATTERN), f"missing, although {WINDOW} is {window}")
    elif isinstance(pattern, list) and len(pattern) != count:
        yield Problem(subject.location(PATTERN), f"{len(pattern)} entries for {count} layers")
    elif not has_window and isinstance(pattern, list) and any(pattern):
        message = f"missing, although {PATTERN} gives {sum(map(bool, pattern))} layers a window"
        yield Problem(subject.location(WINDOW), message, outcome="drops")


@check(
    "G03",
    effect="llama.cpp taps the input of a listed layer, so that every feature is one layer too early",
    fix=FIX_CONVERT,
    source=LOADER,
    outcome="drops",
)
def taps_are_inputs(subject: Subject) -> Iterator[Problem]:
    """dflash.target_layers counts from 1: the list of safetensors configs plus one.

    A list with a 0 was copied without the one: no tapped layer has the input of layer 0 as its output.
    """
    found = look_up(subject.config, TAPS)
    if _is_gguf(subject) and isinstance(found, list) and any(is_int(tap) and tap < 1 for tap in found):
        yield Problem(subject.location(TAPS), f"found {found}, expected {[tap + 1 for tap in found if is_int(tap)]}")


@check(
    "G04",
    effect="llama.cpp does not read the key, and takes its default",
    fix=FIX_COPY,
    source=f"{LOADER}; src/llama-arch.cpp",
)
def keys_are_current(subject: Subject) -> Iterator[Problem]:
    """A GGUF draft states mask token, windows and causality under the keys that llama.cpp reads."""
    for former, current in FORMER_KEYS.items() if _is_gguf(subject) else ():
        value = look_up(subject.config, former)
        if value is not MISSING and look_up(subject.config, current) is MISSING:
            repair = {current: value, former: REMOVED}
            yield Problem(subject.location(former), f"{value}, which llama.cpp reads from {current}", repair=repair)


@check(
    "S44",
    effect="llama.cpp stops at a file without a tokenizer, and compares the tokens with the target's",
    fix="copy the target's tokenizer: dflash convert {draft} {out} --to gguf --tokenizer TARGET.gguf",
    source="ggml-org/llama.cpp src/llama-vocab.cpp; conversion/qwen.py set_vocab",
    engines=(NAME,),
    unnamed="warning",
)
def gguf_has_a_tokenizer(subject: Subject) -> Iterator[Problem]:
    """A GGUF file holds the tokenizer of the target, with a token for each row of the vocabulary."""
    if not _is_gguf(subject):
        return
    found, size = look_up(subject.config, TOKENS), subject.stated.body.get("vocab_size")
    location = subject.location("tokenizer.ggml.tokens")
    if look_up(subject.config, "tokenizer.ggml.model") is MISSING or found is MISSING:
        yield Problem(location, "missing, expected the tokenizer of the target")
    elif found != size:
        yield Problem(location, f"{found} tokens, expected {size}, the vocabulary of the draft")


@check(
    "S45",
    effect="llama.cpp stops, because it multiplies norms only in F32",
    fix="dflash convert {draft} {out} --to gguf",
    source="ggml-org/llama.cpp conversion/base.py prepare_tensors",
    engines=(NAME,),
    unnamed="warning",
)
def gguf_has_wide_vectors(subject: Subject) -> Iterator[Problem]:
    """Norms in a GGUF file are F32."""
    for name, info in (subject.tensors or {}).items() if _is_gguf(subject) else ():
        if len(info.shape) == 1 and info.dtype != "F32":
            yield Problem(f"{WEIGHTS}:{name}", f"{info.dtype}, expected F32")


def _is_gguf(subject: Subject) -> bool:
    return isinstance(subject.format, Gguf) and not isinstance(subject.format, GgufRelative)
