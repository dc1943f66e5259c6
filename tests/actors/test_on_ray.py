"""What is read from errors of Ray, which tells of them in words alone."""

from __future__ import annotations

import pytest

from penstock.actors.on_ray import _raised

OURS = """\
ray::Runner.fill() (pid=9363, ip=127.0.0.1, actor_id=6d27, repr=<Runner object>)
  File "a.py", line 15, in do
    raise RuntimeError("boom")
RuntimeError: boom
The above exception was the direct cause of the following exception:
ray::Runner.fill() (pid=9363, ip=127.0.0.1, actor_id=6d27, repr=<Runner object>)
  File "messages.py", line 63, in fail
    raise EnvWorkerError(
penstock.core.errors.EnvWorkerError: slot 0 of Some in step() at episode 3, step 3
Traceback (most recent call last):
  File "a.py", line 15, in do
    raise RuntimeError("boom")
RuntimeError: boom"""
OTHER = """\
ray::Echo.fail() (pid=1, ip=127.0.0.1)
  File "echo.py", line 3, in fail
    raise ValueError("one\\ntwo")
ValueError: one
two"""


@pytest.mark.parametrize(
    ("text", "begins", "ends"),
    [(OURS, "EnvWorkerError: slot 0 of Some in step() at", "RuntimeError: boom"), (OTHER, "ValueError: one", "two"),
     ("gone", "gone", "gone")],
)  # fmt: skip
def test_the_error_itself_is_found_under_its_traceback(text: str, begins: str, ends: str) -> None:
    found = _raised(text.splitlines())
    assert found.startswith(begins) and found.endswith(ends)
