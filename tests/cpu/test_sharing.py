"""What modes mean, and which rank works on which rows. No process, no tensor."""

from __future__ import annotations

import pytest

from dash_attn.errors import InputError
from dash_attn.problem import Mask
from dash_attn.schedule.sharing import MODES, Cut, Layout, Rows, Teams, Work, deal, in_place, teams_of


@pytest.mark.parametrize(
    ("mode", "of_4_and_8", "of_4_and_6"),
    [
        ("auto", Teams(4, False), Teams(2, True)),
        ("ulysses", Teams(4, False), None),
        ("gather", Teams(1, False), Teams(1, False)),
        ("ring", Teams(1, True), Teams(1, True)),
        ("ulysses+gather", Teams(4, False), Teams(2, False)),
        ("ulysses+ring", Teams(4, True), Teams(2, True)),
    ],
)
def test_what_a_mode_means(mode: str, of_4_and_8: Teams, of_4_and_6: Teams | None) -> None:
    """Of 4 ranks with 8 and with 6 kv heads. Bytes are the same in all modes, so they tell nothing."""
    assert teams_of(mode, 4, 8) == of_4_and_8
    if of_4_and_6 is None:
        with pytest.raises(InputError, match="6 kv heads are no multiple of 4 ranks"):
            teams_of(mode, 4, 6)
    else:
        assert teams_of(mode, 4, 6) == of_4_and_6


def test_every_mode_is_in_that_table() -> None:
    (table,) = (mark for mark in test_what_a_mode_means.pytestmark if mark.name == "parametrize")  # type: ignore[attr-defined]
    assert [row[0] for row in table.args[1]] == list(MODES)


FULL = Cut(Mask.full(), 128, 1024)


def test_rows_that_are_whole_segments_stay_where_they_are() -> None:
    layout = Layout((4096,), 2, "zigzag")
    work = deal(layout, FULL, 4, 1)
    assert work == [
        Work((Rows(0, 0, 1024), Rows(0, 3072, 4096)), (0, 4)),
        Work((Rows(0, 1024, 3072),), (0, 4)),
    ]
    assert in_place(layout, work)


def test_segments_are_dealt_longest_first_to_who_has_least() -> None:
    """Sequences of 3,000, 1,800 and 600 rows: segments of 1,024 x 3,000 and less, down to 600 x 600."""
    layout = Layout((600, 3000, 1800), 2, "contiguous")
    work = deal(layout, FULL, 4, 1)
    assert [mine.rows for mine in work] == [
        (Rows(0, 0, 600), Rows(1, 0, 1024), Rows(1, 2048, 3000)),
        (Rows(1, 1024, 2048), Rows(2, 0, 1800)),
    ]
    assert not in_place(layout, work)


def test_all_rows_are_dealt_anew_if_one_rank_has_a_part_of_a_segment() -> None:
    """Of six parts of 512 rows the last rank has the two in the middle, a segment. The others have halves."""
    layout = Layout((3072,), 3, "zigzag")
    work = deal(layout, FULL, 4, 1)
    assert [mine.rows for mine in work] == [(Rows(0, n, n + 1024),) for n in (0, 1024, 2048)]
    assert not in_place(layout, work)


def test_ranks_of_a_team_share_heads() -> None:
    layout = Layout((8192,), 4, "contiguous")
    work = deal(layout, FULL, 8, 2)
    assert [mine.heads for mine in work] == [(0, 4), (4, 8), (0, 4), (4, 8)]
    assert [mine.rows for mine in work] == [(Rows(0, 0, 4096),)] * 2 + [(Rows(0, 4096, 8192),)] * 2
