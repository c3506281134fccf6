"""What is deployed, in bytes: ``python -m local sizes`` builds the functions and layers and prints what each weighs."""

import io
import zipfile
from pathlib import Path

from local import build


def main() -> int:
    """Print a table: each function and layer, and of the dependency layer each package; 0."""
    build.build()
    folder = build.TEMPLATE.parent
    parts = sorted(path for path in folder.iterdir() if path.is_dir())
    packages = sorted((folder / "DependenciesLayer" / "python").iterdir(), key=unpacked, reverse=True)
    print(f"built for {build.architecture()}, in kB: as it is unpacked in Lambda, and as it is uploaded\n")
    for path in parts:
        print(f"{path.name:<28} {unpacked(path) / 1000:>9,.0f} {packed(path) / 1000:>9,.0f}")
    print("\nof which, in the dependency layer:\n")
    for path in packages:
        if unpacked(path) >= 100_000:  # noqa: PLR2004 - the rest is metadata
            print(f"{path.name:<28} {unpacked(path) / 1000:>9,.0f} {packed(path) / 1000:>9,.0f}")
    return 0


def unpacked(path: Path) -> int:
    """The bytes of a folder's files, or of a file."""
    return sum(file.stat().st_size for file in _files(path))


def packed(path: Path) -> int:
    """The bytes of an archive of them."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in _files(path):
            archive.write(file, file.relative_to(path.parent))
    return len(content.getvalue())


def _files(path: Path) -> list[Path]:
    return [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
