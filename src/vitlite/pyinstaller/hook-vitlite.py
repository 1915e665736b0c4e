"""Include the tables, the labels and the small model that come with vitlite."""

from PyInstaller.utils.hooks import collect_data_files

datas = collect_data_files("vitlite")
