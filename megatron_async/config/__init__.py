"""The command line: flags, settings, checks."""
