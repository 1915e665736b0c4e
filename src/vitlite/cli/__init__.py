"""The command `vitlite`: words of a command line become calls of the library."""
