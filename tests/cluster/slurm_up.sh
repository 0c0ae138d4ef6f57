#!/bin/bash
# A real SLURM cluster of virtual nodes on this one machine: LAB=folder [NODES=3] [NAME=n] slurm_up.sh
#
# Each node is its own network, UTS, PID, IPC and mount namespace on a bridge that lives in the head's namespace, so
# nothing of it is in the machine's own network, and SIGKILL to a node's first process is a power cut. Needs root;
# installs Debian's packages where they are missing. Nothing in /etc or /run is written but by apt-get.
# Ends with 0 when every node is idle; with 77 and a reason where it cannot be done here. Again: boots what is missing.
set -euo pipefail
umask 022
: "${LAB:?a folder}" "${NODES:=3}" "${NAME:=n}"
: "${KILLWAIT:=10}" "${SLURMDTIMEOUT:=10}" "${GRACETIME:=20}"
RUN=$LAB/run
FREEZER=/sys/fs/cgroup/freezer
HEAD=10.77.0.254

cannot() { echo "no SLURM here: $*" >&2; exit 77; }
# A pid file holds "pid start-time": a pid that another process has now is never taken for ours.
started() { local s; s=$(cat "/proc/$1/stat" 2>/dev/null) || return 1; s=${s##*) }; set -- $s; [ "$1" != Z ] && echo "${20}"; }
note() { echo "$2 $(started "$2")" > "$RUN/$1.pid"; }
alive() { local p t; [ -s "$RUN/$1.pid" ] || return 1; read -r p t < "$RUN/$1.pid"; [ "$(started "$p" || true)" = "$t" ]; }
pid_of() { local p t; read -r p t < "$RUN/$1.pid"; echo "$p"; }

[ "$(id -u)" = 0 ] || cannot "it takes root"
need=()
for pair in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge ip:iproute2 unshare:util-linux ps:procps; do
  [ -x "/usr/sbin/${pair%%:*}" ] || [ -x "/usr/bin/${pair%%:*}" ] || [ -x "/bin/${pair%%:*}" ] || need+=("${pair##*:}")
done
mkdir -p "$LAB"/{etc,log,state,spool,munge,bin,lib} "$RUN"
if [ ${#need[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || cannot "${need[*]} missing, and no apt-get to install them"
  export DEBIAN_FRONTEND=noninteractive
  install=(apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=60 "${need[@]}")
  { timeout 90 "${install[@]}" || { timeout 90 apt-get update && timeout 90 "${install[@]}"; }; } \
    > "$LAB/log/apt.log" 2>&1 < /dev/null || cannot "apt-get could not install ${need[*]}: $(tail -1 "$LAB/log/apt.log")"
fi
timeout 10 unshare --net --uts --ipc --mount --pid --fork true 2>/dev/null || cannot "namespaces may not be made"

export SLURM_CONF=$LAB/etc/slurm.conf
if ! alive head; then
  TRACK=linuxproc
  if mkdir "$FREEZER/probe-$$" 2>/dev/null; then rmdir "$FREEZER/probe-$$"; TRACK=cgroup; fi
  echo "$TRACK" > "$LAB/proctrack"
  (umask 077; head -c 1024 /dev/urandom > "$LAB/etc/munge.key")
  { echo "127.0.0.1 localhost"; echo "$HEAD head"; for i in $(seq "$NODES"); do echo "10.77.0.$i $NAME$i"; done; } > "$LAB/etc/hosts"
  echo "hosts: files" > "$LAB/etc/nsswitch.conf"
  {
    cat <<C
ClusterName=lab
SlurmctldHost=head($HEAD)
SlurmctldPort=17500
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$LAB/munge/munge.sock
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool/%n
SlurmctldPidFile=$RUN/slurmctld.own
SlurmdPidFile=$RUN/slurmd.%n.own
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/slurmd.%n.log
DebugFlags=NO_CONF_HASH
ProctrackType=proctrack/$TRACK
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=$KILLWAIT
SlurmdTimeout=$SLURMDTIMEOUT
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
C
    for i in $(seq "$NODES"); do
      echo "NodeName=$NAME$i NodeHostname=$NAME$i NodeAddr=10.77.0.$i Port=17600 CPUs=8 RealMemory=64000 State=UNKNOWN"
    done
    echo "PartitionName=work Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=$GRACETIME State=UP"
    echo "PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP"
  } > "$SLURM_CONF"
  [ "$TRACK" != cgroup ] || printf 'CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n' > "$LAB/etc/cgroup.conf"
fi

# The first process of a node: it reaps, and never ends by itself; when it is killed, so is everything on the node.
cat > "$LAB/lib/node.sh" <<'N'
#!/bin/bash
name=$1 ip=$2 lab=$3
set -e
mount --make-rprivate /
mount -t proc proc /proc
hostname "$name"
mount --bind "$lab/etc/hosts" /etc/hosts
mount --bind "$lab/etc/nsswitch.conf" /etc/nsswitch.conf
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs "$lab/bin" # the node has the real clients, not the head's
for _ in $(seq 200); do ip link show eth0 >/dev/null 2>&1 && break; sleep 0.05; done
ip link set lo up; ip addr add "$ip/24" dev eth0; ip link set eth0 up
export SLURM_CONF=$lab/etc/slurm.conf
cd /
slurmd -D -N "$name" -f "$SLURM_CONF" </dev/null &
set +e
trap : TERM INT HUP
while :; do wait -n; [ -n "$(jobs -p)" ] || sleep 1; done
N

# Clients enter the head's network.
for c in sbatch srun scancel scontrol squeue sinfo; do
  cat > "$LAB/bin/$c" <<S
#!/bin/bash
export SLURM_CONF=$LAB/etc/slurm.conf
read -r p _ < $RUN/head.pid && exec nsenter -t \$p -n -u -- /usr/bin/$c "\$@"
S
done
cat > "$LAB/bin/node" <<S
#!/bin/bash
# node crash|cut|heal NAME. crash: everything on it is killed at once; cut, heal: its network link goes down, up.
set -e
read -r p t < $RUN/\$2.pid
s=\$(cat /proc/\$p/stat); s=\${s##*) }; set -- \$1 \$2 \$s; [ "\${22}" = "\$t" ] || { echo "\$2 is not running" >&2; exit 1; }
read -r h _ < $RUN/head.pid
case \$1 in
  crash) kill -KILL \$p ;;
  cut) nsenter -t \$h -n ip link set v\$2 down ;;
  heal) nsenter -t \$h -n ip link set v\$2 up ;;
esac
S
chmod 755 "$LAB"/bin/*

if ! alive munged; then
  rm -f "$LAB"/munge/munge.sock*
  munged --key-file="$LAB/etc/munge.key" --socket="$LAB/munge/munge.sock" --pid-file="$RUN/munged.own" \
    --log-file="$LAB/log/munged.log" --seed-file="$LAB/munge/seed" --num-threads=2 || cannot "munged did not start"
  note munged "$(cat "$RUN/munged.own")"
fi
if ! alive head; then
  setsid unshare --net --uts --mount sh -c "mount --make-rprivate / && hostname head && \
    mount --bind $LAB/etc/hosts /etc/hosts && mount --bind $LAB/etc/nsswitch.conf /etc/nsswitch.conf && \
    touch $RUN/head.ready && exec sleep infinity" </dev/null >>"$LAB/log/head.log" 2>&1 &
  p=$!
  for _ in $(seq 200); do [ -e "$RUN/head.ready" ] && break; sleep 0.05; done
  note head $p || cannot "the head did not start: $(tail -1 "$LAB/log/head.log")"
  [ -e "$RUN/head.ready" ] || cannot "the head did not start: $(tail -1 "$LAB/log/head.log")"
  nsenter -t $p -n sh -ec "ip link set lo up; ip link add br0 type bridge; ip addr add $HEAD/24 dev br0; ip link set br0 up" \
    2>>"$LAB/log/head.log" || cannot "a bridge may not be made: $(tail -1 "$LAB/log/head.log")"
fi
H=$(pid_of head)
if ! alive slurmctld; then
  setsid nsenter -t "$H" -u -m -n -- slurmctld -D -f "$SLURM_CONF" </dev/null >>"$LAB/log/slurmctld.out" 2>&1 &
  note slurmctld $!
fi
for i in $(seq "$NODES"); do
  n=$NAME$i
  ! alive "$n" || continue
  mkdir -p "$LAB/spool/$n"
  setsid unshare --net --uts --ipc --mount --pid --fork --kill-child bash "$LAB/lib/node.sh" "$n" "10.77.0.$i" "$LAB" \
    </dev/null >>"$LAB/log/$n.log" 2>&1 &
  u=$! p=
  for _ in $(seq 200); do p=$(ps -o pid= --ppid $u 2>/dev/null | tr -d ' ' || true); [ -n "$p" ] && break; sleep 0.02; done
  [ -n "$p" ] || cannot "node $n did not start: $(tail -1 "$LAB/log/$n.log")"
  note "$n" "$p"
  nsenter -t "$H" -n sh -ec "ip link del v$n 2>/dev/null || :; ip link add v$n type veth peer name eth0 netns $p; ip link set v$n master br0 up" \
    2>>"$LAB/log/$n.log" || cannot "node $n has no network: $(tail -1 "$LAB/log/$n.log")"
done
for _ in $(seq 60); do
  up=$(timeout 10 "$LAB/bin/sinfo" -h -N -p work -t idle,alloc,mix,comp -o %N 2>/dev/null | sort -u | wc -l) || up=0
  [ "$up" -ge "$NODES" ] && exit 0
  sleep 0.5
done
cannot "only $up of $NODES nodes came up: $(tail -1 "$LAB/log/slurmctld.log" 2>/dev/null)"
