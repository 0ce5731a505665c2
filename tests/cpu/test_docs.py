"""Pages quote what the JSON says, their links lead somewhere, and the mechanism sees what is stale."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from dash_attn.tools.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

BACKWARD = "benchmarks/results/h200-backward.json"
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def quoted() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield import_module("quoted")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_pages_quote_what_was_measured(page: Path, quoted: ModuleType) -> None:
    assert quoted.stale(page.read_text()) == [], "python benchmarks/figures.py writes them anew"


@pytest.mark.parametrize(
    "name", ["performance", "measurements", "roofline", "reliability", "hand-over", "replication"]
)
def test_pages_of_figures_quote_some(name: str, quoted: ModuleType) -> None:
    assert len(list(quoted.quotes((ROOT / "docs" / f"{name}.md").read_text()))) >= 4


def test_the_readme_shows_what_bounds_prints(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block.removeprefix("```\n") for block in CODE.findall((ROOT / "README.md").read_text())]
    (command,) = re.findall(r"^dash-attn (bounds .*)$", "\n".join(blocks), re.MULTILINE)
    assert main(command.split()) == 0
    assert f"{capsys.readouterr().out.strip()}\n```" in blocks


def test_a_stale_figure_is_seen_and_mended(quoted: ModuleType) -> None:
    page = f"it is <!-- from {BACKWARD}: grid-table-points -->25, faster\n".replace("table-", "det-")
    (line,) = quoted.stale(page)
    assert line == f"line 1: {BACKWARD}: grid-det-points is 24, the page has 25"
    assert quoted.filled(page) == page.replace("25", "24")
    assert quoted.stale(quoted.filled(page)) == []
    longer = page.replace("25", "24,000")  # not 24 with something behind it
    assert quoted.stale(longer)


def test_a_stale_table_is_seen_and_mended(quoted: ModuleType) -> None:
    empty = "before\n\n<!-- from dash_attn.model.roofline: units -->\n\nafter\n"
    full = quoted.filled(empty)
    assert full.startswith("before\n\n<!-- from")
    assert full.endswith(" |\n\nafter\n")
    assert "| tensor cores | 2,560 | 2,560 |\n" in full
    assert quoted.stale(full) == []
    assert quoted.stale(full.replace("2,560 | 2,560", "2,560 | 2,561"))
    assert quoted.stale(full.replace("| tensor cores | 2,560 | 2,560 |\n", ""))
    assert quoted.filled(full.replace("2,560", "0")) == full


def test_markers_that_say_nothing_raise(quoted: ModuleType) -> None:
    with pytest.raises(ValueError, match="line 3: no figure behind"):
        quoted.stale(f"\n\nis <!-- from {BACKWARD}: points --> many\n")
    with pytest.raises(ValueError, match="line 2: .* begins the line"):
        quoted.stale(f"at\n  <!-- from {BACKWARD}: points -->56 points\n")
    with pytest.raises(KeyError, match="no-such-name"):
        quoted.stale(f"at <!-- from {BACKWARD}: no-such-name -->1\n")
    with pytest.raises(KeyError, match=r"other\.json"):
        quoted.stale("at <!-- from other.json: points -->1\n")
    with pytest.raises(ValueError, match="units is not a figure within a line"):
        quoted.stale("is <!-- from dash_attn.model.roofline: units -->1\n")


def test_every_value_can_be_computed(quoted: ModuleType) -> None:
    values = import_module("tables").VALUES
    assert all(value() for value in values.values())
    assert {source for source, _ in values if not source.endswith(".json")} == {
        "benchmarks/summary.py",
        "dash_attn.model.links",
        "dash_attn.model.roofline",
        "tests/cpu/counts.py",
    }


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = HEADING.findall(CODE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(CODE.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_contract_names_tests_that_exist() -> None:
    """A test without a file is in the one that was named before it."""
    files = {path.name: path.read_text() for path in (ROOT / "tests").glob("*/*.py")}
    others = {path.name for folder in ("src", "examples") for path in (ROOT / folder).rglob("*.py")}
    named = re.findall(
        r"`(?:\w+/)*(\w+\.py)?(?:::(test_\w+)(\*?))?`", (ROOT / "docs/bit-contract.md").read_text()
    )
    assert sum(bool(test) for _, test, _ in named) > 60
    before = ""
    for file, test, more in named:
        assert not file or file in files or file in others, file
        before = file or before
        if test:
            assert f"def {test}{'' if more else '('}" in files[before], (before, test)


def test_the_pages_on_reliability_name_files_and_tests_that_exist() -> None:
    pages = "".join(
        (ROOT / f"docs/{name}.md").read_text() for name in ("reliability", "hand-over", "sanitizers")
    )
    named = re.findall(r"`([\w/]+\.py)(?:::(test_\w+))?`", pages)
    assert len(named) > 40
    for file, test in named:
        path = next((path for top in ("", "src/dash_attn") if (path := ROOT / top / file).is_file()), None)
        assert path is not None, file
        assert f"def {test}" in path.read_text(), (file, test)


def test_the_glossary_names_files_that_exist() -> None:
    rows = (ROOT / "docs/glossary.md").read_text().splitlines()
    paths = [row.split("|")[-2].strip(" `") for row in rows if row.endswith("` |")]
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / "src/dash_attn" / path).exists()] == []
