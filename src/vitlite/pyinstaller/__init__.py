"""The PyInstaller hook of vitlite, which adds the data files of vitlite to an application.

PyInstaller finds the hook by the entry point `hook-dirs` of vitlite, which names `hook_folders`.
"""

from pathlib import Path


def hook_folders() -> list[str]:
    """Return a list of the folders that contain PyInstaller hooks, which is only the folder of this module."""
    return [str(Path(__file__).parent)]
