"""The command `vitlite`, one module for each subcommand."""
