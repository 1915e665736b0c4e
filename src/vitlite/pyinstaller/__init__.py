"""The hook that makes PyInstaller include vitlite's data files. PyInstaller finds it by its entry point."""

from pathlib import Path


def hook_folders() -> list[str]:
    """Return the folder with the hook."""
    return [str(Path(__file__).parent)]
