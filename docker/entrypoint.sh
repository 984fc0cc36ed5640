#!/bin/sh
# Run a command with the cluster's secret: the variable KVFLOW_CLUSTER_SECRET, or what is in the file that
# KVFLOW_CLUSTER_SECRET_FILE names. Whoever comes first makes the file.
set -eu
file=${KVFLOW_CLUSTER_SECRET_FILE:-}
if [ -z "${KVFLOW_CLUSTER_SECRET:-}" ] && [ -n "$file" ]; then
    if [ ! -e "$file" ]; then
        draft=$(mktemp "$file.XXXXXX") # mode 0600
        python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > "$draft"
        ln "$draft" "$file" 2> /dev/null || true # fails if another container was faster: then its secret is ours
        rm "$draft"
    fi
    KVFLOW_CLUSTER_SECRET=$(cat "$file")
    export KVFLOW_CLUSTER_SECRET
fi
exec "$@"
