#!/bin/sh
# A SLURM epilog (slurm.conf: Epilog=/etc/slurm/epilog.d/tierfall.sh): when a job has ended on this node, for any
# reason, it flushes the checkpoints that its trainer left in host memory, for five minutes at most.
#
# SLURM runs it as root on every node of the job. Set PrologEpilogTimeout to more than the deadline. With a private
# /dev/shm per job (job_container/tmpfs), set the host tier's folder to one outside of it.
#
# Adapt the next two lines to your machines.
tierfall=${TIERFALL:-/opt/tierfall/bin/tierfall}
config=${TIERFALL_CONFIG:-/shared/runs/${SLURM_JOB_USER}/tiers.yaml}

if [ ! -r "$config" ]; then
    exit 0 # not a job that uses tierfall
fi
if [ "$(id -u)" -eq 0 ] && [ "$SLURM_JOB_USER" != root ]; then
    runuser -u "$SLURM_JOB_USER" -- "$tierfall" drain --config "$config" --deadline 5m
else
    "$tierfall" drain --config "$config" --deadline 5m
fi
exit 0 # anything else would take the node out of service
