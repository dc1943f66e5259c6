from __future__ import annotations

from tests.run.conftest import finished, same_run

__all__ = ["finished", "same_run"]
