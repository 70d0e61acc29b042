"""One file per verb of the `artifact` command. Nothing heavy is imported at the top of any of them."""
