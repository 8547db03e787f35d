"""One module for each subcommand. Its `register` adds the subcommand to the `headrace` command."""
