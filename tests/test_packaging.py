"""What pyproject.toml says it needs is what is tested."""

import runpy

from packaging.requirements import Requirement
from packaging.version import Version

from dflash_testing.paths import ROOT


def test_every_dependency_has_a_lowest_release_and_a_tested_one() -> None:
    """`scripts/check floors` installs the lowest, `constraints.txt` names the other."""
    lowest = [Requirement(pin) for pin in runpy.run_path(str(ROOT / "scripts" / "floors.py"))["floors"](ROOT)]
    assert len(lowest) >= 9
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = {name: Version(version) for name, _, version in (line.partition("==") for line in lines) if version}
    for requirement in lowest:
        (pin,) = requirement.specifier
        assert tested[requirement.name] >= Version(pin.version), requirement
