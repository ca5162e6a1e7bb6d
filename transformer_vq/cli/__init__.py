"""The `tvq` command: one file per command, imported when it runs."""
