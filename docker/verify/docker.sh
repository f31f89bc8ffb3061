# shellcheck shell=bash
# What verify.sh needs of an engine, by Docker.
# shellcheck disable=SC2154 # variables of verify.sh

run_flags=()
for volume in "${volumes[@]}"; do run_flags+=(--volume "$name-$volume"); done

build() {
    local folders
    folders=$(python3 "$tools/pip_conf.py" --folders <"$work/pip.conf" | xargs)
    [[ -z $folders ]] || echo "note: docker build cannot mount the folders that pip reads here: $folders"
    DOCKER_BUILDKIT=1 docker build --file "$dockerfile" --tag "$image" --secret "id=pip.conf,src=$work/pip.conf" "$root"
}

layers() { docker history --format '{{.Size}}  {{.CreatedBy}}' "$image" | cut -c1-100; }

# In a container of their own: a command, and the image's entrypoint.
inside() { docker run --rm --interactive "${run_flags[@]}" --entrypoint "$1" "$image" "${@:2}"; }
inside_base() { docker run --rm --interactive --entrypoint "$1" "$base" "${@:2}"; }
trained() { docker run --rm "${run_flags[@]}" "$image" "$@"; }

# One at a time in the background, and a command beside it.
start() {
    docker rm --force "$name" >/dev/null 2>&1 || true
    docker run --detach --name "$name" "${run_flags[@]}" "$@" >/dev/null
}
start_trainer() { start "$image" "$@"; }
start_command() { start --init --entrypoint "$1" "$image" "${@:2}"; }
inside_running() { docker exec --interactive "$name" "$@"; }
terminate() { docker kill --signal TERM "$name" >/dev/null; }
ended() { [[ $(docker inspect --format '{{.State.Running}}' "$name") == false ]]; }
exit_code() { docker inspect --format '{{.State.ExitCode}}' "$name"; }
logs() { docker logs "$name" 2>&1; }

remove_all() {
    docker rm --force "$name"
    for volume in "${volumes[@]}"; do docker volume rm --force "$name-${volume%%:*}"; done
}
