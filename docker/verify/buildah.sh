# shellcheck shell=bash
# What verify.sh needs of an engine, by buildah and without one: processes in a chroot of the image's files, with the
# image's user, environment and volumes, and no namespaces of their own.
# shellcheck disable=SC2154 # variables of verify.sh

base=${base%%@*} # an image that is made here has another digest
mkdir -p "$cache/tmp" "$work"/{runs,data,cache}
chmod 755 "$work"
export TMPDIR=$cache/tmp # the cache mounts of the build are kept there
main=
run_flags=()
for volume in "${volumes[@]}"; do run_flags+=(--volume "$work/$volume"); done

b() { buildah --root "$cache/storage" --runroot "$cache/run" "$@"; }

build() {
    local folder volume mounts=()
    b inspect --type image "localhost/$base" >/dev/null 2>&1 || make_base
    while read -r folder; do
        mounts+=(--volume "$folder:$folder:ro")
    done < <(python3 "$tools/pip_conf.py" --folders <"$work/pip.conf")
    b build --isolation chroot --layers --pull-never --secret "id=pip.conf,src=$work/pip.conf" "${mounts[@]}" \
        --build-arg "BASE=localhost/$base" --file "$dockerfile" --tag "$image" "$root"
    b rmi --prune >/dev/null
    b from --pull-never --name "$name" "localhost/$image" >/dev/null
    for volume in "${volumes[@]}"; do # or buildah mounts a folder of its own instead
        b config --volume "${volume#*:}-" "$name"
    done
    chown -R "$(of_image .OCIv1.Config.User)" "$work"/{runs,data,cache}
}

make_base() {
    local folder=$work/base container python suite
    [[ $base =~ ^python:(3\.[0-9]+)-slim-([a-z]+)$ ]] || fail "no release of Debian to make the base $base of"
    python=python${BASH_REMATCH[1]} suite=${BASH_REMATCH[2]}
    echo "making $base of Debian's packages"
    debootstrap --variant=minbase --include="$python,python3-pip-whl" "$suite" "$folder" \
        ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$work/log" || fail "debootstrap"
    ln -s "$python" "$folder/usr/bin/python"
    # As in the image it stands for: pip may install, and there are neither lists of packages nor documentation.
    rm -rf "$folder/usr/lib/$python/EXTERNALLY-MANAGED" "$folder"/var/cache/apt/* "$folder"/var/lib/apt/lists/* \
        "$folder"/usr/share/{doc,man,locale,info,lintian} "$folder"/var/log/*
    printf 'path-exclude /usr/share/%s/*\n' doc man locale info >"$folder/etc/dpkg/dpkg.cfg.d/docker"
    # shellcheck disable=SC2016 # the inner shell's
    chroot "$folder" sh -c 'python "$(echo /usr/share/python-wheels/pip-*.whl)/pip" --isolated install --quiet \
        --root-user-action ignore --no-index --find-links /usr/share/python-wheels pip'
    container=$(b from scratch)
    b copy --quiet "$container" "$folder" / >/dev/null
    b commit --quiet --rm "$container" "localhost/$base" >/dev/null
    rm -rf "$folder"
}

of_image() { b inspect --type image --format "{{$1}}" "$image"; }

layers() {
    of_image 'range .OCIv1.RootFS.DiffIDs}}{{.}} {{end' | python3 -c '
import json, sys
sizes = {layer.get("diff-digest"): layer.get("diff-size", 0) for layer in json.load(open(sys.argv[1]))}
sizes = [sizes[digest] / 1e6 for digest in sys.stdin.read().split()]
print("layers, MB:", " ".join(f"{size:.1f}" for size in sizes), f"= {sum(sizes):.0f}")
' "$cache/storage/overlay-layers/layers.json"
}

# A command, and the image's entrypoint.
inside() { b run --isolation chroot "${run_flags[@]}" "$name" -- "$@"; }
trained() { # shellcheck disable=SC2046 # a word of the entrypoint is one word here
    inside $(entrypoint) "$@"
}
entrypoint() { of_image 'range .OCIv1.Config.Entrypoint}}{{.}} {{end'; }
inside_base() {
    b from --pull-never --name "$name-base" "localhost/$base" >/dev/null
    b run --isolation chroot "$name-base" -- "$@"
}

# One at a time in the background, and a command beside it.
start() {
    rm -f "$work/code"
    (inside "$@" >"$work/log" 2>&1 && echo 0 >"$work/code" || echo $? >"$work/code") &
    main=$!
}
start_trainer() { # shellcheck disable=SC2046
    start $(entrypoint) "$@"
}
start_command() { start tini -s -- "$@"; }
inside_running() { inside "$@"; }
ended() { [[ -s $work/code ]]; }
exit_code() { cat "$work/code"; }
logs() { cat "$work/log"; }

process_1() { # what would be it in a container of its own: the first tini below buildah
    local process=$main
    while [[ $(ps -o comm= "$process") != tini ]]; do
        process=$(pgrep --oldest --parent "$process") || return 1
    done
    echo "$process"
}
terminate() { kill -TERM "$(process_1)"; }

remove_all() {
    local process
    if process=$(process_1); then # tini first, or it outlives its child by a moment
        pkill -KILL --parent "$process" || true
        wait "$main" || true
    fi
    b rm "$name" "$name-base"
}
