"""The fresh process of a check: a shape as JSON on standard input, hashes on standard output."""

from __future__ import annotations

import json
import sys

from .checks import hashes_of
from .shapes import Shape

question = json.load(sys.stdin)
print(json.dumps(hashes_of(Shape.from_json(question["shape"]), question["device"])))
