"""The subcommands of this distribution, one plugin module each."""
