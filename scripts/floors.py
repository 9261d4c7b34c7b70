"""Print the lowest direct releases that pyproject.toml allows, one requirement per line.

torch is an exception: old CPU builds are not available everywhere, so the release of constraints.txt is printed. Tools
that only read the code (ruff, mypy) are left out.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AS_CONSTRAINED = ("torch",)
LEFT_OUT = ("ruff", "mypy", "dflash-cli")


def floors(root: Path) -> list[str]:
    """`name==lowest` with its marker, for every dependency of the package and of the tests."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [pin for item in [*project["dependencies"], *extras["gpu"], *extras["dev"]] if (pin := _pin(item, root))]


def _pin(requirement: str, root: Path) -> str | None:
    name = re.match(r"[\w-]+", requirement)
    if name is None or name[0] in LEFT_OUT:
        return None
    if name[0] in AS_CONSTRAINED:
        constraints = (root / "constraints.txt").read_text().splitlines()
        return next(line for line in constraints if line.startswith(f"{name[0]}=="))
    if ">=" not in requirement:
        raise SystemExit(f"pyproject.toml: {requirement!r} states no lowest release")
    return requirement.replace(">=", "==")


if __name__ == "__main__":
    print("\n".join(floors(ROOT)))
