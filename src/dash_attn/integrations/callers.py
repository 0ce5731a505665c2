"""Models of transformers that take any ``attn_implementation`` and never call it: refused where it is chosen.

Those that make their masks by transformers' own functions meet a :class:`.TokenMask`, which raises. Others
(DeBERTa, WavLM, XLNet) would run their own attention in silence, or know none but their own by name (SAM).
Some do so in a part (the encoder of PEGASUS-X, the audio tower of Gemma 3n): these are refused once they are
built, when it is known which layers they have.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache, wraps
from typing import Any

from ..errors import InputError

__all__ = ["refuse_models_that_do_not_call"]

_NAMES: set[str] = set()
_CHOSEN, _CAN, _MARK = "get_correct_attn_implementation", "_can_set_attn_implementation", "_dash_attn_checks"
"""Methods of transformers' models: one sees every name that is chosen, the other knows who calls it."""
_SET = "set_attn_implementation"
"""It leaves models alone that cannot take a name later, with no more than a warning."""
_TABLE = "ALL_ATTENTION_FUNCTIONS"
"""Transformers' functions by name, among them ours."""
_OWN_TABLE = "_CLASSES[config._attn_implementation]"
"""Classes of a model by name."""
_OWN_CLASS = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)
"""An attention of the model's own. Transformers looks for it, too, but older versions not for every name."""
_ANOTHER_KIND = re.compile("Deformable|Gated")
"""Layers that are called attention, and weigh something else than keys."""
_BUILT = "post_init"
"""The method that models call when they have their layers."""


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
            raise InputError(_does_its_own(self, requested))
        return chosen(self, *arguments, **options)

    setattr(checked, _MARK, True)
    setattr(PreTrainedModel, _CHOSEN, checked)
    _check_parts(PreTrainedModel)
    change = getattr(PreTrainedModel, _SET, None)
    if change is None:
        return

    @wraps(change)
    def changed(self: Any, attn_implementation: Any, *arguments: Any, **options: Any) -> Any:
        for part, requested in _parts(self, attn_implementation, PreTrainedModel):
            if requested not in _NAMES or requested == part.config._attn_implementation:
                continue
            if not _calls(type(part), PreTrainedModel):
                raise InputError(_does_its_own(part, requested))
            _refuse_own_layers(part, requested, PreTrainedModel)
            if not getattr(part, _CAN)():
                raise InputError(
                    f"transformers does not change the attention of a {type(part).__name__} to {requested!r} "
                    "later: give attn_implementation when the model is built"
                )
        return change(self, attn_implementation, *arguments, **options)

    setattr(PreTrainedModel, _SET, changed)


def _check_parts(base: Any) -> None:
    built = getattr(base, _BUILT, None)
    if built is None:
        return

    @wraps(built)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        requested = getattr(self.config, "_attn_implementation", None)
        if requested in _NAMES:
            _refuse_own_layers(self, requested, base)
        return built(self, *arguments, **options)

    setattr(base, _BUILT, checked)


def _refuse_own_layers(model: Any, requested: str, base: Any) -> None:
    """Raise InputError if a layer of the model does attention by itself. Models in it that have another
    configuration are asked on their own."""
    layers: list[Any] = [model]
    while layers:
        layer = layers.pop()
        if _attends_by_itself(layer.__class__):
            raise InputError(_does_its_own(model, requested, f", in {type(layer).__name__}"))
        for child in layer.children():
            if not isinstance(child, base) or type(child.config) is type(model.config):
                layers.append(child)


@cache
def _attends_by_itself(kind: Any) -> bool:
    """Whether a class of layers has a softmax and does not speak of the table of attentions. False also of a
    class of PyTorch, and where the source cannot be read."""
    name = kind.__name__
    if not name.endswith("Attention") or _ANOTHER_KIND.search(name) or kind.__module__.startswith("torch."):
        return False
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    return "softmax" in source and _TABLE not in source


def _does_its_own(model: Any, requested: str, where: str = "") -> str:
    return (
        f"{type(model).__name__} does its own attention{where}: it would not call {requested!r} attention, "
        "or not in all its parts. Choose another attn_implementation, 'eager' or 'sdpa'; if parts of it do "
        f"call it, name those, such as attn_implementation={{'text_config': {requested!r}}}"
    )


def _parts(model: Any, asked: Any, base: type) -> Iterator[tuple[Any, Any]]:
    """The models that a model is made of, with the name that each is asked to take; None: none.

    A dict names parts by their configuration, "" all that have none of their own.
    """
    own: Any = model.config
    configs = {id(getattr(own, key)): key for key in getattr(own, "sub_configs", ())}
    for part in model.modules():
        theirs = getattr(part, "config", None) if isinstance(part, base) else None
        if part is model or (theirs is not None and type(theirs) is not type(own)):
            key = "" if part is model else configs.get(id(theirs), "")
            yield part, asked.get(key) if isinstance(asked, dict) else asked


def _calls(model: type, base: type) -> bool:
    """Whether the model, or one that it is made from, uses the attention of a name.

    That is so if the module of a class speaks of the table of attentions, as one of somebody's own may; or if
    transformers knows it and no module has an attention of its own. Not if one has a table of its own. True
    also of a class whose source cannot be read, such as one of a notebook.
    """
    kinds = [kind for kind in model.__mro__ if issubclass(kind, base) and kind is not base]
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
