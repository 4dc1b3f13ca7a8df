"""Charts as static SVG text: no library, no script, so that a page with them is one file and prints. Pure; no torch."""
