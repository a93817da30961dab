"""The routes that people, operators and the command line use."""
