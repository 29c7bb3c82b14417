"""What installs the least versions that members allow."""

from __future__ import annotations

from oldest import oldest
from packaging.requirements import Requirement
from repository import members


def test_each_bound_of_a_member_is_required_and_nothing_pins_torch() -> None:
    lines = [line for line in oldest() if line and not line.startswith("#")]
    folders = [line for line in lines if line.startswith("-")]
    assert sorted(folders) == sorted(f"-e ./{member.path}" for member in members())
    required = {str(Requirement(line)) for line in lines if line not in folders}
    for member in members():
        if member.pyproject.get("tool", {}).get("treadle", {}).get("default", True):
            needs = map(Requirement, member.pyproject["project"].get("dependencies", []))
            assert {str(n) for n in needs if not n.name.startswith("treadle-")} <= required
    of_torch = [Requirement(line) for line in required if line.startswith(("torch", "triton"))]
    assert {n.name for n in of_torch} == {"torch", "triton"}
    assert "==" not in "".join(str(n.specifier) for n in of_torch)
    assert any(line.startswith("llguidance") for line in required), "it is an extra's"
