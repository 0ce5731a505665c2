"""Command line: ``python -m dash_attn`` is ``dash-attn``."""

from __future__ import annotations

import sys

from .tools.cli import main

sys.exit(main())
