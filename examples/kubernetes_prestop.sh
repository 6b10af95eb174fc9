#!/bin/sh
# A preStop hook for the container that trains. It tells the trainer, whose pid 1 may be a shell that hands no signal on,
# that the end is near, waits until it has drained (drain: {deadline: 100s} in the file) and ended, and brings what may
# still lie in host memory to the tiers: /dev/shm goes with the pod.
#
#     terminationGracePeriodSeconds: 120
#     containers:
#       - name: trainer
#         env: [{name: TIERFALL_CONFIG, value: /etc/run/tiers.yaml}]
#         lifecycle: {preStop: {exec: {command: [/bin/sh, /opt/run/kubernetes_prestop.sh]}}}
#
# The notice, in seconds: a little less than terminationGracePeriodSeconds, of which the hook's time is taken.
notice=${TIERFALL_NOTICE:-110}
ends=$(($(date +%s) + notice))

pid=$(tierfall ls --json | python3 -c 'import json, sys; print((json.load(sys.stdin)["owner"] or {"pid": ""})["pid"])')
if [ -n "$pid" ]; then
    kill -TERM "$pid"
    while [ "$(date +%s)" -lt "$ends" ] && grep -qs '^State:[[:space:]]*[^XZ[:space:]]' "/proc/$pid/status"; do
        sleep 1
    done
fi
left=$((ends - $(date +%s)))
if [ "$left" -gt 0 ]; then
    tierfall drain --deadline "${left}s"
fi
