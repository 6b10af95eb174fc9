#!/bin/sh
# A SLURM prolog (slurm.conf: Prolog=/etc/slurm/prolog.d/tierfall.sh, PrologFlags=Alloc). Before a job starts on this
# node, it brings what the job will restore to a disk of the node, for ten minutes at most: what has arrived by then
# stays, and the next prolog continues from there.
#
# SLURM runs it as root on every node of the job, without a PATH. PrologEpilogTimeout must be longer than the limit. In
# a job of several nodes each node brings its part of the ranks, which SLURM distributes in blocks by default.
#
# Change the four lines below for your machines.
tierfall=${TIERFALL:-/opt/tierfall/bin/tierfall}
config=${TIERFALL_CONFIG:-/shared/runs/${SLURM_JOB_USER}/tiers.yaml}
scontrol=${SCONTROL:-/usr/bin/scontrol}
limit=${TIERFALL_LIMIT:-10m}
PATH=${PATH:-/usr/bin:/bin:/usr/sbin:/sbin}

if [ ! -r "$config" ]; then
    exit 0 # not a job of tierfall's
fi
set -- timeout "$limit" "$tierfall" prefetch --config "$config"
if [ -n "$SLURM_JOB_NODELIST" ] && nodes=$("$scontrol" show hostnames "$SLURM_JOB_NODELIST"); then
    number=$(printf '%s\n' "$nodes" | grep -nxF "$SLURMD_NODENAME" | cut -d : -f 1)
    if [ -n "$number" ]; then
        set -- "$@" --node "$((number - 1))/$(printf '%s\n' "$nodes" | wc -l)"
    fi
fi
if [ "$(id -u)" -eq 0 ] && [ "$SLURM_JOB_USER" != root ]; then
    runuser -u "$SLURM_JOB_USER" -- "$@"
else
    "$@"
fi
exit 0 # anything else would take the node out of service: the job restores from a slower tier
