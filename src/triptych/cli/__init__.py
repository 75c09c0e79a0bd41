"""The command line: file name = subcommand. Nothing here imports torch."""
