"""Read a script's files, without running them. Pure."""
