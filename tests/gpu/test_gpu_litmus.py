"""The hand-over alone, under load: promised forms hand over what was written, and a broken one shows."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from litmus import FORMS, LOADS, PROMISED, SHAPES, run

ROUNDS = int(float(os.environ.get("DASH_ATTN_LITMUS_ROUNDS", "4e5")))
TICKETS = 2048


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", PROMISED)
def test_a_promised_hand_over_hands_over_what_was_written(form, shape, load):
    found = run(replace(SHAPES[shape], form=FORMS[form]), ROUNDS, load=load, tickets=TICKETS)
    assert found.rounds >= ROUNDS
    assert found.reads > 0
    assert found.timeouts == 0
    assert sum(found.wrong) == 0, f"first: block, tile, ticket, wrong words = {found.first}"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_flag_raised_too_early_shows(shape):
    form = FORMS["nothing_relaxed"]
    found = run(replace(SHAPES[shape], form=form), ROUNDS, load="dram", tickets=TICKETS)
    assert sum(found.wrong) > 0
    assert found.first is not None


@pytest.mark.parametrize("shape", ["small-order", "large-order"])
def test_a_relaxed_flag_after_a_complete_wait_shows(shape):
    """Why the flag is released: see docs/hand-over.md."""
    found = run(replace(SHAPES[shape], form=FORMS["relaxed"]), ROUNDS, load="dram", tickets=TICKETS)
    assert sum(found.wrong) > 0
