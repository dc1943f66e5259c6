from __future__ import annotations

from tests.run.replays.recorded import recorded

__all__ = ["recorded"]
