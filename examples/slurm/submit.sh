#!/bin/bash
# instep writes the batch script (runs/…/submit.sh) and submits it.
# Arguments of this script are appended: examples/slurm/submit.sh --nodes 4 --follow
instep submit slurm examples/digits.py \
    --nodes 2 -n 2 --time 0:30:00 \
    --on-node-failure requeue \
    "$@"
