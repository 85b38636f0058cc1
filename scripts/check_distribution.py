"""Checks the contents of a wheel and an sdist.

Usage: python scripts/check_distribution.py FOLDER DIRECT

FOLDER contains an sdist and the wheel built from it, DIRECT a wheel built from the checkout.
"""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def the_one(folder: Path, pattern: str) -> Path:
    """Returns the only file of a folder that matches a pattern."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"{folder}: {len(found)} files {pattern}; there is to be one")
    return found[0]


def contents(wheel: Path) -> dict[str, bytes]:
    """Returns the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def problems(wheel: dict[str, bytes], direct: dict[str, bytes], sdist: set[str]) -> list[str]:
    """Returns descriptions of all problems.

    Args:
        wheel: The files of the wheel built from the sdist.
        direct: The files of the wheel built from the checkout.
        sdist: The names of the files of the sdist, without its top folder.
    """
    found = []
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ortops").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    metadata = {name for name in wheel if name.split("/")[0].endswith(".dist-info")}
    if missing := sources - wheel.keys():
        found.append(f"the wheel lacks {sorted(missing)}")
    if extra := wheel.keys() - sources - metadata:
        found.append(f"the wheel has {sorted(extra)} besides ortops")
    if "ortops/py.typed" not in wheel:
        found.append("the wheel lacks py.typed")
    if not any(name.endswith("/licenses/LICENSE") for name in metadata):
        found.append("the wheel lacks LICENSE")
    if wheel != direct:
        changed = {name for name in wheel.keys() | direct if wheel.get(name) != direct.get(name)}
        found.append(f"the sdist builds another wheel than the checkout: {sorted(changed)}")
    wanted = {"LICENSE", "README.md", "pyproject.toml", "tests/conftest.py"}
    if missing := wanted - sdist:
        found.append(f"the sdist lacks {sorted(missing)}")
    if extra := {name for name in sdist if name.startswith("tests/golden")}:
        found.append(f"the sdist has {sorted(extra)}")
    return found


def main(folder: Path, direct: Path) -> int:
    """Prints problems and returns 1, or prints a summary and returns 0."""
    wheel = contents(the_one(folder, "*.whl"))
    with tarfile.open(the_one(folder, "*.tar.gz")) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    found = problems(wheel, contents(the_one(direct, "*.whl")), sdist)
    for problem in found:
        print(problem)
    if not found:
        print(f"{the_one(folder, '*.whl').name}: {len(wheel)} files; sdist: {len(sdist)} files")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
