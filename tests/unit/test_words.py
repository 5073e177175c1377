"""Names and first lines of the package are in the words of `spec_notes/terms.md`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import zarr_shardstore

PACKAGE = Path(zarr_shardstore.__file__).parent

BANNED = {
    "anew": "again",
    "collected_indexes": "consolidated_index",
    "file_calls": "fs",
    "file_states": "fs",
    "finals": "WriteBuffer",
    "flights": "single_flight",
    "gathering": "call_batching",
    "held": "locked, or buffered",
    "held_by_thread": "locked_by_me",
    "hold_at_once": "try_lock",
    "holding": "WriteBuffer",
    "index_collection": "consolidated_index",
    "is_light": "can_commit_inline",
    "kept_zstd": "zstd",
    "kinds_of_store": "store_traits",
    "know": "lookup",
    "knowledge": "generation",
    "known_arrays": "array_cache",
    "lead_at_once": "commit_inline",
    "learn": "put",
    "learned": "put",
    "local_files": "local backend",
    "met": "lookup",
    "misfit": "InvalidChunkKey",
    "misfits": "InvalidChunkKey",
    "nobody": "no other program",
    "object_versions": "etags",
    "opened_shard": "ShardWriter",
    "presented": "to_user",
    "publish": "flush",
    "publisher": "flusher",
    "publishing": "flush",
    "put_back": "reapply",
    "recent_arrays": "array_cache",
    "remembered": "cached",
    "runner": "driver",
    "settled": "consistent",
    "side_by_side": "gather_bounded",
    "somebody": "another writer",
    "stacked_key": "TransformedKey",
    "take_out": "strip",
    "translator": "key_table",
    "warm_file": "cached file",
    "warm_files": "cached_files",
    "warm_reads": "fast_reads",
    "whoever": "the writer, the reader",
}
"""Words of earlier versions that mean nothing outside of this project, and what to say."""

PUBLIC = {"warm_reads"}
"""A field of `Stats`, which users read."""

_SUBJECT = re.compile(r"\b(whoever|somebody|nobody)\b", re.IGNORECASE)
_QUESTION = re.compile(r"(What|Which|Where|How|Who|Whoever|Whose)\b")


def modules() -> list[str]:
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def words_of(identifier: str) -> str:
    """An identifier in lower case, its words between underscores.

    >>> words_of("KnownArrays")
    '_known_arrays_'
    """
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower()
    return f"_{snake.strip('_')}_"


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Names of classes, functions, arguments, attributes and variables."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name) | ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                yield name
            case ast.arg(name) | ast.Attribute(_, name) | ast.Name(name):
                yield name


def summaries(tree: ast.AST) -> Iterator[str]:
    """First lines of all docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring.splitlines()[0]


def banned_in(identifier: str) -> list[str]:
    return [
        f"{word} → {say}" for word, say in BANNED.items() if f"_{word}_" in words_of(identifier)
    ]


@pytest.mark.parametrize("module", modules())
def test_words(module: str) -> None:
    """No word of the old vocabulary is in a name; no summary begins with a question word."""
    source = (PACKAGE / module).read_text(encoding="utf-8")
    tree = ast.parse(source)
    names = {*identifiers(tree), *module.removesuffix(".py").split("/")}
    found = {
        name: banned for name in sorted(names) if (banned := banned_in(name)) and name not in PUBLIC
    }
    assert not found
    assert not [line for line in summaries(tree) if _QUESTION.match(line)]
    assert not _SUBJECT.findall(source), "name the actor: the writer, the reader, another program"


MAX_WORDS = 22
_TABLE = re.compile(r"^\s*(>>>|===|---)|[│◀▶]|==== |-----", re.MULTILINE)


def long_sentences_in(source: str) -> list[str]:
    """The sentences of docstrings and comments that are too long to say. Tables have none."""
    texts = [
        re.sub(r"::\n\n(?: {4,}.*\n|\n)+", ".\n\n", f"{node.value.value}\n")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    texts += [
        re.sub(r"(?m)^\s*#", "", block) for block in re.findall(r"(?m)(?:^\s*#.*\n)+", source)
    ]
    paragraphs = [
        part for text in texts for part in re.split(r"\n\s*\n|\n(?=\s*(?:\d+\.|-) )", text)
    ]
    return [
        sentence
        for part in paragraphs
        if not _TABLE.search(part)
        for sentence in re.split(r"(?<=[.:;!?])\s+", " ".join(part.split()))
        if len(sentence.split()) > MAX_WORDS
    ]


@pytest.mark.parametrize("module", modules())
def test_sentences_can_be_said(module: str) -> None:
    assert long_sentences_in((PACKAGE / module).read_text(encoding="utf-8")) == []


def test_a_long_sentence_is_found() -> None:
    long = " ".join(["word"] * (MAX_WORDS + 1))
    assert long_sentences_in(f'"""{long}."""\n') == [f"{long}."]
    assert long_sentences_in(f"# Short. {long}\n") == [long]
    assert long_sentences_in(f'"""Short::\n\n    {long}\n"""\n') == []


def test_the_rule_can_fail() -> None:
    """A banned word is found in each kind of name, and a summary in each kind of docstring."""
    code = '''
"""What is known."""
class KnownArrays: ...
def _publisher(runner): self.is_settled = knowledge
'''
    tree = ast.parse(code)
    banned = {name for name in identifiers(tree) if banned_in(name)}
    assert banned == {"KnownArrays", "_publisher", "runner", "is_settled", "knowledge"}
    assert [line for line in summaries(tree) if _QUESTION.match(line)] == ["What is known."]
    assert not banned_in("published_at")


def test_the_glossary_has_the_fifteen_words() -> None:
    """A page that a newcomer reads once."""
    page = (PACKAGE.parent / "spec_notes" / "terms.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\| \*\*", page, re.MULTILINE)) == 15
