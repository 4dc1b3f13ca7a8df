"""The report of one or several runs: what ran, what came out, where the time went. From their directories alone."""
