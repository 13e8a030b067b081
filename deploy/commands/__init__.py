"""The `baton` command: one file for each group of subcommands."""
