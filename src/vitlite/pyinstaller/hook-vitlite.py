"""A PyInstaller hook that includes the tables, the labels and the small model that vitlite contains."""

from pathlib import Path

package = Path(__file__).parents[1]
datas = [(str(folder), f"vitlite/{folder.parent.name}/data") for folder in package.glob("*/data")]
