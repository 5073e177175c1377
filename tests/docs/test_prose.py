"""What people read first is short, and is in short sentences."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import zarr_shardstore

ROOT = Path(__file__).parents[2]
READ_FIRST = [
    ROOT / "README.md",
    ROOT / "spec_notes/guarantees.md",
    *sorted(set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs/explanation/benchmarks.md"}),
]
"""All that users read, but the page that is made of docstrings of benchmarks."""

PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "spec_notes").rglob("*.md")]


def sentences(markdown: str) -> Iterator[str]:
    """Sentences of paragraphs, items of lists and cells of tables, without the names of tests.

    A piece of code and the address of a link count as one word.
    """
    text = re.sub(r"(?ms)^```.*?^```$", "\n\n", markdown)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`tests/[^`]*`,?", "", text)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"(?m)^(#.*|[-*] |\d+[.)]? |\|)", r"\n\n\1", text)
    for block in re.split(r"\n\s*\n|\|| · ", text):
        for sentence in re.split(r"(?<=[.!?])[*)\"”]*\s+", " ".join(block.split())):
            if words(sentence):
                yield sentence


def words(sentence: str) -> list[str]:
    return [word for word in sentence.split() if re.search(r"\w", word)]


@pytest.mark.parametrize("page", READ_FIRST, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_sentences_are_short(page: Path) -> None:
    """At most 25 words."""
    long = [each for each in sentences(page.read_text(encoding="utf-8")) if len(words(each)) > 25]
    assert not long, "\n".join(long)


def test_help_of_the_store_has_short_sentences() -> None:
    """As `help(ShardingStore)` shows it, but without signatures, types and examples."""
    text = zarr_shardstore.ShardingStore.__doc__ or ""
    text = re.sub(r"(?m)^ *(>>>|\.\.\.).*$", "", text).replace("``", "`")
    text = re.sub(r"(?m)^\S.*\n(?= {4})", "\n\n", inspect.cleandoc(text))  # names and types
    long = [each for each in sentences(text) if len(words(each)) > 25]
    assert not long, "\n".join(long)


def test_the_documents_are_few_words() -> None:
    """What is said twice goes. Figures that benchmarks print lie elsewhere."""
    counts = {page: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    longest = sorted(counts.items(), key=lambda item: -item[1])[:10]
    assert sum(counts.values()) <= 45_000, longest


def test_long_sentences_are_found() -> None:
    """In a paragraph, in a list and in a table; code and links are single words."""
    one = "word " * 26
    for text in (one, f"- short.\n- {one}", f"| a | {one} |", f"Short. {one}"):
        assert any(len(words(each)) > 25 for each in sentences(text))
    code = "word " * 24 + "`a b c d e`"
    for text in (code, "word " * 24 + "[a](b)", f"- {code}\n- {code}", f"```\n{one}\n```"):
        assert all(len(words(each)) <= 25 for each in sentences(text))
