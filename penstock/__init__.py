"""penstock: reinforcement learning in one loop and one record, where placement changes nothing but speed."""

from __future__ import annotations

__version__ = "0.1.0"
