"""Parameters of policies and placements: what cannot be used is refused when they are made."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from dash_attn.errors import InputError
from dash_attn.schedule import POLICIES, ByLength, Descending, Numerics, Schedule, Shift
from dash_attn.schedule.placement import PLACEMENTS, LongFirst, Pairs, Placement

PARAMETERS: list[tuple[type[Numerics | Placement], str, int]] = [
    (Descending, "by_head_from", 0), (Shift, "ring", 1), (Shift, "stride", 1), (Shift, "min_stride", 1),
    (Shift, "max_stride", 1), (ByLength, "long_from", 0), (ByLength, "shift_from", 0),
    (Pairs, "heads_at_once", 1), (LongFirst, "long_from", 0),
]  # fmt: skip
"""Class, parameter, and least value."""


def test_every_parameter_is_listed() -> None:
    kinds = (*POLICIES.values(), *PLACEMENTS.values())
    assert [(kind, name) for kind, name, _ in PARAMETERS] == [(k, f.name) for k in kinds for f in fields(k)]


@pytest.mark.parametrize(("kind", "name", "least"), PARAMETERS)
def test_parameters_are_integers_in_their_range(kind: Any, name: str, least: int) -> None:
    """Whatever mask comes later: one that cannot be used is refused at once."""
    assert getattr(kind(**{name: least}), name) == least
    optional = kind.__dataclass_fields__[name].default is None
    for value in (least - 1, 2.5, "2", True, *(() if optional else (None,))):
        message = rf"{kind.name}: {name} must be an integer >= {least}, got {value!r}$"
        with pytest.raises(InputError, match=message):
            kind(**{name: value})
    for text in (f"{kind.name}({name}={least - 1})", f"spt + {kind.name}({name}={least - 1})"):
        if text.startswith("spt") == issubclass(kind, Placement):
            with pytest.raises(InputError, match=rf"{name} must be .* got {least - 1}$"):
                Schedule.parse(text)


def test_strides_that_do_not_go_together() -> None:
    with pytest.raises(InputError, match="shift: min_stride must be <= max_stride, got 3 and 2$"):
        Shift(min_stride=3, max_stride=2)
    with pytest.raises(InputError, match="shift: stride 2 leaves nothing for .* max_stride 4 to decide$"):
        Shift(stride=2, max_stride=4)
