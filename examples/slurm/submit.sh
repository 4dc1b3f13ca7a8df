#!/bin/bash
# The same by instep: it writes the batch script (runs/…/submit.sh) and submits it.
# Words given to this script are added: examples/slurm/submit.sh --nodes 4 --follow
instep submit slurm examples/digits.py \
    --nodes 2 -n 2 --time 0:30:00 \
    --on-node-failure requeue \
    "$@"
