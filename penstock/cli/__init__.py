"""The command line: one small file for each command, each imported only when it is asked for."""
