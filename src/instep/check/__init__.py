"""Find silent distributed bugs in any PyTorch script.

Three parts, which meet in a rule (`check/rule.py`):

- `observe` hooks into torch inside each rank of the script, and writes observations to a file of that rank. It changes
  nothing that the script computes, and issues no collectives.
- `source` reads the script's files, without running them.
- `rules` judge both: pure functions from observations and source to findings, one module for each rule.
"""
