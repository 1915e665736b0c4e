"""vitlite's PyInstaller hook, which adds vitlite's data files to an application.

PyInstaller finds the hook through vitlite's entry point `hook-dirs`, which refers to `hook_folders`.
"""

from pathlib import Path


def hook_folders() -> list[str]:
    """Return a list of the folders that contain PyInstaller hooks, which is only the folder of this module."""
    return [str(Path(__file__).parent)]
