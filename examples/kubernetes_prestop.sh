#!/bin/sh
# A preStop hook for the container that trains. It sends SIGTERM to the trainer itself, since pid 1 may be a shell that
# forwards no signals. It waits until the trainer has drained (drain: {deadline: 100s} in the file) and ended. Then it
# flushes what is still in host memory to the tiers: /dev/shm is deleted with the pod.
#
#     terminationGracePeriodSeconds: 120
#     containers:
#       - name: trainer
#         env: [{name: TIERFALL_CONFIG, value: /etc/run/tiers.yaml}]
#         lifecycle: {preStop: {exec: {command: [/bin/sh, /opt/run/kubernetes_prestop.sh]}}}
#
# The notice, in seconds: a little less than terminationGracePeriodSeconds, which includes the time of the hook.
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
