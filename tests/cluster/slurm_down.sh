#!/bin/bash
# Ends exactly what slurm_up.sh started, by pid and start time: LAB=folder [NODES=3] [NAME=n] slurm_down.sh
set -uo pipefail
: "${LAB:?a folder}" "${NODES:=3}" "${NAME:=n}"
started() { local s; s=$(cat "/proc/$1/stat" 2>/dev/null) || return 1; s=${s##*) }; set -- $s; [ "$1" != Z ] && echo "${20}"; }
end() {
  local file=$LAB/run/$1.pid p t sig
  shift
  [ -s "$file" ] || return 0
  read -r p t < "$file"
  for sig in "$@"; do
    [ "$(started "$p")" = "$t" ] || break
    kill -"$sig" "$p" 2>/dev/null
    for _ in $(seq 100); do [ "$(started "$p")" = "$t" ] || break; sleep 0.05; done
  done
}
for i in $(seq "$NODES"); do end "$NAME$i" KILL; done
end slurmctld TERM KILL
end head TERM KILL
end munged TERM KILL
for i in $(seq "$NODES"); do
  cgroup=/sys/fs/cgroup/freezer/slurm_$NAME$i
  [ ! -d "$cgroup" ] || find "$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null
done
exit 0
