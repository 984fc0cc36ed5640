#!/bin/sh
# Build the image, run the demo with both profiles, and leave no container, network or volume behind.
#
#   docker/demo.sh [PROJECT]    a name for what is made meanwhile; a new one at each run by default
set -eu
cd "$(dirname "$0")"
COMPOSE_PROJECT_NAME=${1:-kvflow-demo-$(od -A n -N 4 -t x4 /dev/urandom | tr -d ' ')}
export COMPOSE_PROJECT_NAME

compose() {
    if docker compose version > /dev/null 2>&1; then docker compose "$@"; else docker-compose "$@"; fi
}
down() {
    compose --profile tcp --profile shm --profile observe down --volumes --remove-orphans
}
trap down EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

echo 'building kvflow:local (a few minutes at first)'
compose --profile tcp build --quiet driver-tcp
status=0
for profile in tcp shm; do
    echo "== profile $profile"
    if ! compose --profile "$profile" run --rm -T "driver-$profile" < /dev/null; then
        status=1
        compose --profile "$profile" logs --tail 50
    fi
    down
done
trap - EXIT
exit $status
