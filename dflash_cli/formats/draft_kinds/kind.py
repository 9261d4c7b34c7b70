"""The base class of kinds of drafts that dflash describes, checks and renames, but does not run."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from dflash_cli.formats.dialect import named_architectures
from dflash_cli.formats.draft_kinds.table import BODY, Key, Release, Renaming, Service, Tensors, Variant
from dflash_cli.formats.relatives import Relative


class Kind(Relative):
    """A kind of draft as a table. Subclasses are data; `KindReading` reads every table.

    stated          settings of the kind
    parts           tensors of the kind
    derived         size -> its formula
    head            description of the part that DFlash lacks, with sizes in braces
    services        engines that serve the kind
    renamings       other names of the same draft, if engines differ in names alone
    why_not_renamed the reason for the absence of a renaming
    is_chain        the draft writes one token after another, and the user chooses their number
    serve_flags     needs that serve commands must meet
    serve_settings  vLLM's settings of speculative decoding beside method, model and number of tokens
    aliases         prefix of a tensor's name -> its prefix in the table
    free            pattern of tensors outside the table: the target family defines their names
    listed          pattern of the architectures with all their tensors in the table
    """

    stated: ClassVar[tuple[Key, ...]] = ()
    parts: ClassVar[tuple[Tensors, ...]] = ()
    derived: ClassVar[Mapping[str, str]] = {}
    head: ClassVar[str] = ""
    services: ClassVar[tuple[Service, ...]] = ()
    renamings: ClassVar[tuple[Renaming, ...]] = ()
    why_not_renamed: ClassVar[str] = "its names are the same in every engine that serves it"
    is_chain: ClassVar[bool] = False
    serve_flags: ClassVar[frozenset[str]] = frozenset()
    serve_settings: ClassVar[Mapping[str, Any]] = {}
    aliases: ClassVar[Mapping[str, str]] = {}
    free: ClassVar[str] = r"(?!)"
    listed: ClassVar[str] = ""

    def service(self, engine: str) -> Service | None:
        """The entry of an engine, None if no release of it serves the kind."""
        return next((item for item in self.services if item.engine == engine), None)

    def why_unserved(
        self, engine: str, release: Release, config: Mapping[str, Any], values: Mapping[str, Any]
    ) -> str | None:
        """The reason why a release of an engine does not serve a draft; None if it serves it."""
        service = self.service(engine)
        if service is None:
            return f"no release has a model for {self.title} drafts"
        demands = service.demands
        if "speculators_model_type" in config:
            demands = {**service.demands, **service.of_types}
            stated, known = [str(config["speculators_model_type"])], service.types
            what = "speculators_model_type"
        else:
            stated, known = named_architectures(config)[:1], service.architectures
            what = "the architecture"
        firsts = [known[name] for name in stated if name in known]
        if not firsts:
            return f"it does not know {what} {', '.join(stated) or 'of a config without architectures'}"
        if release < firsts[0]:
            return f"it reads {what} {stated[0]} from {'.'.join(map(str, firsts[0]))} on"
        left_out = next(self.outside(demands, values), None)
        if left_out is not None:
            return f"it serves only {left_out}"
        vocab, own = values.get("vocab"), values.get("draft_vocab")
        if service.needs_all_ids and own is not None and own != vocab:
            return f"it needs the target's whole vocabulary, found draft_vocab_size {own} of {vocab}"
        return None

    def outside(self, allowed: Mapping[str, tuple[Any, ...]], values: Mapping[str, Any]) -> Iterator[str]:
        """For each setting with another value than some allowed ones: the setting, these values and its value."""
        for size, choices in allowed.items():
            value = values.get(size)
            if not any(type(item) is type(value) and item == value for item in choices):
                name = next(key.names[-1] for key in self.stated if key.size == size).removeprefix(BODY)
                stated = [repr(item) for item in choices if item is not None]
                words = " or ".join(stated) if stated else "absent"
                yield f"{name} {words}, found {value!r}"


def variant_of(config: Mapping[str, Any]) -> Variant:
    """The layout of a config."""
    return "speculators" if "speculators_model_type" in config else "native"
