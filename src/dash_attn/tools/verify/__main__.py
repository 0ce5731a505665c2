"""The fresh process of a check: a shape as JSON on standard input, hashes on standard output."""

from __future__ import annotations

import json
import sys

from ..shapes import Shape
from .checks import hashes_of

question = json.load(sys.stdin)
print(json.dumps(hashes_of(Shape.from_json(question["shape"]), question["device"])))
