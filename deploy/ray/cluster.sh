#!/usr/bin/env bash
# One model on the GPUs of several machines, with Ray. Every machine needs the same treadle with
# treadle-executor-ray, and the model at the same path.
#
#     machine 1    cluster.sh head                     begin a cluster; prints the address to join
#     machine 2…   cluster.sh join ADDRESS             join it
#     machine 1    cluster.sh serve GPUS MODEL [OPTIONS…]   serve, once the cluster has so many GPUs
#     all          cluster.sh stop                     end Ray on this machine
#
# RAY_AUTH_TOKEN is a secret that all machines need, such as the output of `openssl rand -hex 32`. It does not
# encrypt anything, and the ports of NCCL do not ask for it: open all of them to the machines of the cluster
# only. RAY_PORT is the port of the head (6379). ROOM_SECONDS is how long `serve` waits for the machines (600).
# RESOURCE=CPU counts CPUs in place of GPUs, to try it without any.
set -euo pipefail

export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token
port=${RAY_PORT:-6379}
resource=${RESOURCE:-GPU}

usage() {
    sed -n '5,8s/^# *//p' "$0" >&2
    exit 2
}

available() { # how many GPUs the machines of the cluster have together
    python - "$resource" << 'PYTHON'
import sys

import ray

ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
print(int(ray.cluster_resources().get(sys.argv[1], 0)))
PYTHON
}

wait_for_room() { # NUMBER: wait until so many GPUs have joined
    local deadline=$((SECONDS + ${ROOM_SECONDS:-600})) number
    while number=$(available) && [ "$number" -lt "$1" ]; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            echo "the cluster has $number of $1 ${resource}s; join more machines" >&2
            exit 1
        fi
        echo "the cluster has $number of $1 ${resource}s; waiting for the others" >&2
        sleep 5
    done
}

need_token() {
    if [ -z "${RAY_AUTH_TOKEN:-}" ]; then
        echo "RAY_AUTH_TOKEN is not set; give all machines the same secret" >&2
        exit 1
    fi
}

case ${1:-} in
    head)
        [ $# -eq 1 ] || usage
        need_token
        # the dashboard would let everybody who reaches it run programs
        ray start --head --port "$port" --include-dashboard false --disable-usage-stats
        ;;
    join)
        [ $# -eq 2 ] || usage
        need_token
        ray start --address "$2" --disable-usage-stats
        ;;
    serve)
        [ $# -ge 3 ] || usage
        size=$2 model=$3
        [[ $size =~ ^[1-9][0-9]*$ ]] || usage
        need_token
        shift 3
        wait_for_room "$size"
        exec treadle serve "$model" --distributed-executor-backend ray --tensor-parallel-size "$size" \
            --plugin.executors.ray.address auto "$@"
        ;;
    stop)
        [ $# -eq 1 ] || usage
        ray stop
        ;;
    *)
        usage
        ;;
esac
