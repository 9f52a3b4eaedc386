"""Writes shapes.json anew, from a router before a mock worker: `python -m tests.conformance.record`. Look at the difference."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import httpx

from tests.conformance.asked import shapes_of
from tests.conformance.shapes import RECORDED
from tests.unit.router.elsewhere import serving_elsewhere

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, serving_elsewhere(Path(folder)) as here, httpx.Client(base_url=here.url) as http:
        RECORDED.write_text(json.dumps(shapes_of(http), indent=1) + "\n", encoding="utf-8")
