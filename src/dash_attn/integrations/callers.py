"""Models of transformers that take any ``attn_implementation`` and never call it: refused where it is chosen.

Those that make their masks by transformers' own functions meet a :class:`.TokenMask`, which raises. Others
(DeBERTa, WavLM, XLNet, the encoder of PEGASUS-X) would run their own attention in silence, or know none but
their own by name (SAM).
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import wraps
from typing import Any

from ..errors import InputError

__all__ = ["refuse_models_that_do_not_call"]

_NAMES: set[str] = set()
_CHOSEN, _CAN, _MARK = "get_correct_attn_implementation", "_can_set_attn_implementation", "_dash_attn_checks"
"""Methods of transformers' models: one sees every name that is chosen, the other knows who calls it."""
_TABLE = "ALL_ATTENTION_FUNCTIONS"
"""Transformers' functions by name, among them ours."""
_OWN_TABLE = "_CLASSES[config._attn_implementation]"
"""Classes of a model by name."""
_OWN_CLASS = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)
"""An attention of the model's own. Transformers looks for it, too, but older versions not for every name."""
_PARTLY = "transformers.models.pegasus_x."
"""Its decoder calls a function of the table, its encoder does not."""


def refuse_models_that_do_not_call(name: str) -> None:
    """From now on it is an InputError to choose this name for a model that does attention by itself.

    It needs two methods of transformers that are not documented. Without them nothing is checked.
    """
    from transformers import PreTrainedModel

    _NAMES.update((name, f"paged|{name}"))
    chosen = getattr(PreTrainedModel, _CHOSEN, None)
    if chosen is None or not hasattr(PreTrainedModel, _CAN) or hasattr(chosen, _MARK):
        return

    @wraps(chosen)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        requested = arguments[0] if arguments else options.get("requested_attention")
        if requested in _NAMES and not _calls(type(self), PreTrainedModel):
            raise InputError(
                f"{type(self).__name__} does its own attention: it would not call {requested!r} attention, "
                "or not in all its parts. Choose another attn_implementation, 'eager' or 'sdpa'; if parts of "
                f"it do call it, name those, such as attn_implementation={{'text_config': {requested!r}}}"
            )
        return chosen(self, *arguments, **options)

    setattr(checked, _MARK, True)
    setattr(PreTrainedModel, _CHOSEN, checked)


def _calls(model: type, base: type) -> bool:
    """Whether the model, or one that it is made from, uses the attention of a name.

    That is so if the module of a class speaks of the table of attentions, as one of somebody's own may; or if
    transformers knows it and no module has an attention of its own. Not if one has a table of its own. True
    also of a class whose source cannot be read, such as one of a notebook.
    """
    kinds = [kind for kind in model.__mro__ if issubclass(kind, base) and kind is not base]
    if any(kind.__module__.startswith(_PARTLY) for kind in kinds):
        return False
    try:
        sources = [inspect.getsource(sys.modules[kind.__module__]) for kind in kinds]
    except (KeyError, OSError, TypeError):
        return True
    if any(_OWN_TABLE in source for source in sources):
        return False
    asks = any(_TABLE in source for source in sources)
    if not asks and any(_OWN_CLASS.search(source) for source in sources):
        return False
    return asks or any(getattr(kind, _CAN)() for kind in kinds)
