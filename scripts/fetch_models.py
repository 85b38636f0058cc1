"""Downloads model files from Python packages, for tests/test_real_models.py."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".models"
PACKAGES = ("rapidocr==3.10.0", "silero-vad==6.2.3")


def main() -> int:
    """Downloads the packages and extracts the models, unless this has been done."""
    FOLDER.mkdir(exist_ok=True)
    for package in PACKAGES:
        done = FOLDER / f"{package}.fetched"
        if done.exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            subprocess.run([*command, "--dest", folder, package], check=True)
            for wheel in Path(folder).glob("*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    for name in archive.namelist():
                        if name.endswith(".onnx"):
                            (FOLDER / Path(name).name).write_bytes(archive.read(name))
        done.touch()
    print(*sorted(path.name for path in FOLDER.glob("*.onnx")), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
