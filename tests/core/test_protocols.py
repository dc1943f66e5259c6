from __future__ import annotations

from typing import Protocol

import pytest

from penstock.core.errors import ConfigError
from penstock.core.protocols import members, require_members, required


class Pump(Protocol):
    flow: float

    @property
    def power(self) -> int: ...
    def start(self, speed: float, *, slowly: bool = False) -> None: ...


class Louder(Pump, Protocol):
    def stop(self) -> bool: ...


class Whole:
    flow, power = 1.0, 3

    def start(self, speed: float, *, slowly: bool = False) -> None: ...
    def stop(self) -> bool:
        return True


def test_a_whole_one_passes_and_so_does_its_class() -> None:
    require_members(Whole(), Louder, "docs/pumps.md")
    require_members(Whole, Louder, "docs/pumps.md")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("flow", "flow: float"),
        ("power", "power: int"),
        ("start", r"start\(speed: float, \*, slowly: bool = False\) -> None"),
        ("stop", r"stop\(\) -> bool"),
    ],
)
def test_the_missing_member_is_named_with_its_signature_and_a_page(name: str, shown: str) -> None:
    body = {key: value for key, value in vars(Whole).items() if key not in (name, "__dict__", "__weakref__")}
    broken = type("Broken", (), body)
    with pytest.raises(ConfigError, match=rf"Broken has no {shown}, which Louder asks for; see docs/pumps.md") as error:
        require_members(broken(), Louder, "docs/pumps.md")
    assert "\n" not in str(error.value)
    if name not in ("flow", "power"):  # which an instance may set for itself
        with pytest.raises(ConfigError, match=shown):
            require_members(broken, Louder, "docs/pumps.md")


class Based(Protocol):
    @required
    def start(self) -> None:
        """Must be defined."""

    def stop(self) -> str:
        """Has a default."""
        return "stopped"


def test_what_a_protocol_requires_is_not_inherited_from_it() -> None:
    class Lacks(Based):
        pass

    class Whole(Based):
        def start(self) -> None: ...

    with pytest.raises(ConfigError, match=r"Lacks has no start\(\) -> None, which Based asks for"):
        require_members(Lacks(), Based, "docs/pumps.md")
    require_members(Whole(), Based, "docs/pumps.md")
    assert Whole().stop() == "stopped"


def test_members_of_a_protocol_and_of_those_below_it() -> None:
    assert list(members(Louder)) == ["flow", "power", "start", "stop"]
