"""Python sources found on this machine: collect them, split them, and cut prompts out of the held-out part."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer

from .settings import EvaluationRecipe, Settings

MAX_FILE_BYTES = 300_000  # longer files contain tables and generated lists, not code
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "_vendor", "_vendored", "vendored_templates", "lib-dynload")
MIN_HELD_OUT_GROUPS = 16
# Shorter lines (`return None`, `else:`) occur in all Python code and do not indicate copying.
MIN_TELLING_LINE = 20
MAX_COPIED_SHARE = 0.8
MAX_PROMPTS_PER_FILE = 2


@dataclass(frozen=True)
class Source:
    """One installed source of Python code."""

    name: str
    version: str
    licence: str
    root: Path


@dataclass(frozen=True)
class Module:
    """One source file. Modules of one `group` are always on the same side of the split."""

    source: str
    path: str
    group: str
    text: str
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """All modules, split into training and held-out part."""

    sources: tuple[Source, ...]
    train: tuple[Module, ...]
    held_out: tuple[Module, ...]


@dataclass(frozen=True)
class Prompt:
    """The beginning of a held-out definition, as `text` and as its `token_ids`."""

    id: str
    category: str
    source: str
    text: str
    token_ids: tuple[int, ...]


def find_sources() -> tuple[Source, ...]:
    """The interpreter's standard library and three permissively licensed packages."""
    stdlib = Source("stdlib", f"Python {platform.python_version()}", "PSF-2.0", Path(sysconfig.get_paths()["stdlib"]))
    packages = (("torch", "BSD-3-Clause"), ("transformers", "Apache-2.0"), ("numpy", "BSD-3-Clause"))
    return (stdlib, *(_installed_package(name, licence) for name, licence in packages))


def _installed_package(name: str, licence: str) -> Source:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {name} is needed as training data but is not installed")
    version = importlib.metadata.version(name).partition("+")[0]
    return Source(name, f"{name} {version}", licence, Path(spec.origin).parent)


def load_corpus(settings: Settings) -> Corpus:
    """Read every source, drop duplicates, and split by a hash of the relative path."""
    sources = find_sources()
    seen: set[str] = set()
    train: list[Module] = []
    held_out: list[Module] = []
    for source in sources:
        modules = _read_modules(source, seen, settings.max_source_bytes)
        groups = _held_out_groups(modules, settings.held_out_share)
        train += [module for module in modules if module.group not in groups]
        held_out += [module for module in modules if module.group in groups]
    return Corpus(sources, tuple(_without_copies(_shuffled(train))), tuple(_shuffled(held_out)))


def _read_modules(source: Source, seen: set[str], max_bytes: int | None) -> list[Module]:
    modules: list[Module] = []
    total = 0
    for path in sorted(source.root.rglob("*.py"), key=lambda path: _digest(str(path.relative_to(source.root)))):
        relative = path.relative_to(source.root)
        if any(part in SKIPPED_FOLDERS for part in relative.parts) or path.stat().st_size > MAX_FILE_BYTES:
            continue
        content = path.read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        if not content.strip() or sha256 in seen:
            continue
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        seen.add(sha256)
        name = f"{source.name}/{relative.as_posix()}"
        modules.append(Module(source.name, name, _group(name), text.replace("\r\n", "\n"), sha256))
        total += len(content)
        if max_bytes is not None and total >= max_bytes:
            break
    return modules


def _group(name: str) -> str:
    """Group of a module. transformers copies code between models, so each model's package is one group."""
    parts = name.split("/")
    return "/".join(parts[:3]) if parts[:2] == ["transformers", "models"] and len(parts) > 3 else name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _held_out_groups(modules: Sequence[Module], share: float) -> set[str]:
    """Held-out groups: in hash order, until they hold `share` of the bytes and are numerous enough."""
    sizes: dict[str, int] = defaultdict(int)
    for module in modules:
        sizes[module.group] += len(module.text)
    wanted = share * sum(sizes.values())
    chosen: set[str] = set()
    for group in sorted(sizes, key=_digest):
        if len(chosen) >= MIN_HELD_OUT_GROUPS and sum(sizes[name] for name in chosen) >= wanted:
            break
        chosen.add(group)
    return chosen


def _shuffled(modules: Iterable[Module]) -> list[Module]:
    return sorted(modules, key=lambda module: _digest(module.path))


def _without_copies(modules: Sequence[Module]) -> list[Module]:
    """Drop files that mostly repeat lines of earlier files, because the model would only memorise them."""
    seen: set[int] = set()
    kept: list[Module] = []
    for module in modules:
        lines = [hash(line) for line in _telling(module.text)]
        if sum(line in seen for line in lines) <= MAX_COPIED_SHARE * len(lines):
            kept.append(module)
            seen.update(lines)
    return kept


def telling_lines(modules: Iterable[Module]) -> set[int]:
    """Hashes of lines that are long enough to recognise a copy."""
    return {hash(line) for module in modules for line in _telling(module.text)}


def _telling(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if len(line) >= MIN_TELLING_LINE]


def copied_share(texts: Iterable[str], known_lines: set[int]) -> float:
    """Share of the long lines that also occur, word for word, in a training file."""
    lines = [line for text in texts for line in _telling(text)]
    return sum(hash(line) in known_lines for line in lines) / max(1, len(lines))


def cut_prompts(corpus: Corpus, tokenizer: Tokenizer, known_lines: set[int], recipe: EvaluationRecipe) -> list[Prompt]:
    """The same number of prompts from every source, each the beginning of a definition in a held-out file.

    A prompt is skipped if most of its lines occur in training files, so that copied boilerplate is not measured.
    """
    prompts: list[Prompt] = []
    versions = {source.name: source.version for source in corpus.sources}
    for name, version in versions.items():
        found: list[Prompt] = []
        for module in (module for module in corpus.held_out if module.source == name):
            found += _prompts_of(module, version, tokenizer, known_lines, recipe)
            if len(found) >= recipe.prompts_per_source:
                break
        prompts += found[: recipe.prompts_per_source]
    return prompts


def _prompts_of(
    module: Module, version: str, tokenizer: Tokenizer, known_lines: set[int], recipe: EvaluationRecipe
) -> list[Prompt]:
    starts = [match.start() for match in re.finditer(r"^ *(?:async def|def|class) ", module.text, re.MULTILINE)]
    found: list[Prompt] = []
    for start in sorted(starts, key=lambda start: _digest(f"{module.path}:{start}")):
        spread = recipe.max_prompt_tokens - recipe.min_prompt_tokens
        budget = recipe.min_prompt_tokens + int(_digest(f"{start}:{module.path}")[:8], 16) % (spread + 1)
        text = _cut_at_line_end(module.text[start:], tokenizer, recipe.min_prompt_tokens, budget)
        if text is None or copied_share([text], known_lines) > 0.5:
            continue
        token_ids = tuple(tokenizer.encode(text).ids)
        number = module.text.count("\n", 0, start) + 1
        identifier = f"{module.source}-{_digest(f'{module.path}:{start}')[:8]}"
        origin = f"{module.path}:{number}, {version}"
        found.append(Prompt(identifier, module.source, origin, text, token_ids))
        if len(found) == MAX_PROMPTS_PER_FILE:
            break
    return found


def _cut_at_line_end(text: str, tokenizer: Tokenizer, shortest: int, longest: int) -> str | None:
    """The longest run of whole lines within the budget, without its last newline.

    The tokenizer would join that newline with the indentation of the next line.
    """
    best: str | None = None
    for match in re.finditer(r"\n", text[: longest * 12]):
        candidate = text[: match.start()]
        length = len(tokenizer.encode(candidate).ids)
        if length > longest:
            break
        if length >= shortest and candidate.rstrip() == candidate:
            best = candidate
    return best
