#!/bin/sh
# A SLURM epilog (slurm.conf: Epilog=/etc/slurm/epilog.d/tierfall.sh). When a job has ended on this node, however it
# ended, it flushes what the trainer left in host memory to the tiers, for five minutes at most.
#
# SLURM runs it as root on every node of the job. PrologEpilogTimeout must be longer than the deadline. With a private
# /dev/shm per job (job_container/tmpfs), set the host tier's folder to one outside of it.
#
# Change the two lines below for your machines.
tierfall=${TIERFALL:-/opt/tierfall/bin/tierfall}
config=${TIERFALL_CONFIG:-/shared/runs/${SLURM_JOB_USER}/tiers.yaml}

if [ ! -r "$config" ]; then
    exit 0 # not a job of tierfall's
fi
if [ "$(id -u)" -eq 0 ] && [ "$SLURM_JOB_USER" != root ]; then
    runuser -u "$SLURM_JOB_USER" -- "$tierfall" drain --config "$config" --deadline 5m
else
    "$tierfall" drain --config "$config" --deadline 5m
fi
exit 0 # anything else would take the node out of service
