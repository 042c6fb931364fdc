"""The system calls that a jailed program may make: an allow-list for x86_64, by number.

What is not named answers ENOSYS, so that libraries fall back; what an attack would want answers EPERM, so that
it is seen for what it is. It is installed twice: nsjail's filter holds for the zygote too, which makes namespaces
and one mount for each program; the second filter, on top of it, is the program's own and allows neither.
"""

from __future__ import annotations

import platform
import struct

from sandbox.types import SandboxError

_FILES = """
read=0 write=1 readv=19 writev=20 pread64=17 pwrite64=18 preadv=295 pwritev=296 lseek=8 close=3 open=2
openat=257 creat=85 stat=4 fstat=5 lstat=6 newfstatat=262 statx=332 access=21 faccessat=269 readlink=89
readlinkat=267 getdents=78 getdents64=217 getcwd=79 chdir=80 fchdir=81 rename=82 renameat=264 renameat2=316
mkdir=83 mkdirat=258 rmdir=84 unlink=87 unlinkat=263 link=86 linkat=265 symlink=88 symlinkat=266 truncate=76
ftruncate=77 fallocate=285 chmod=90 fchmod=91 fchmodat=268 chown=92 fchown=93 lchown=94 fchownat=260
utime=132 utimes=235 utimensat=280 futimesat=261 umask=95 dup=32 dup2=33 dup3=292 fcntl=72 ioctl=16 flock=73
fsync=74 fdatasync=75 sync_file_range=277 sendfile=40 copy_file_range=326 splice=275 tee=276 pipe=22
pipe2=293 statfs=137 fstatfs=138 fadvise64=221 poll=7 ppoll=271 select=23 pselect6=270 epoll_create=213
epoll_create1=291 epoll_ctl=233 epoll_wait=232 epoll_pwait=281 eventfd=284 eventfd2=290 timerfd_create=283
timerfd_settime=286 timerfd_gettime=287 signalfd=282 signalfd4=289 inotify_init=253 inotify_init1=294
inotify_add_watch=254 inotify_rm_watch=255 memfd_create=319 close_range=436 faccessat2=439
"""
_MEMORY = """
mmap=9 munmap=11 mremap=25 mprotect=10 madvise=28 brk=12 msync=26 mincore=27 mlock=149 munlock=150
membarrier=324 shmget=29 shmat=30 shmdt=67 shmctl=31
"""
_PROCESS = """
fork=57 vfork=58 execve=59 execveat=322 exit=60 exit_group=231 wait4=61 waitid=247 kill=62 tgkill=234
tkill=200 rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 rt_sigpending=127 rt_sigtimedwait=128
rt_sigqueueinfo=129 rt_tgsigqueueinfo=297 rt_sigsuspend=130 sigaltstack=131 alarm=37 setitimer=38
getitimer=36 pause=34 nanosleep=35 clock_nanosleep=230 clock_gettime=228 clock_getres=229 gettimeofday=96
time=201 times=100 timer_create=222 timer_settime=223 timer_gettime=224 timer_getoverrun=225
timer_delete=226 getpid=39 getppid=110 gettid=186 getuid=102 geteuid=107 getgid=104 getegid=108
getresuid=118 getresgid=120 getgroups=115 getpgid=121 getpgrp=111 getsid=124 setsid=112 setpgid=109
getrlimit=97 setrlimit=160 getrusage=98 getpriority=140 sched_yield=24 sched_getaffinity=204
sched_getparam=143 sched_getscheduler=145 sched_get_priority_max=146 sched_get_priority_min=147 getcpu=309
set_tid_address=218 set_robust_list=273 futex=202 arch_prctl=158 prctl=157 capget=125 uname=63 sysinfo=99
getrandom=318 restart_syscall=219 rseq=334 pidfd_open=434 pidfd_send_signal=424
"""
_SOCKETS = """
connect=42 bind=49 listen=50 accept=43 accept4=288 getsockname=51 getpeername=52 sendto=44 recvfrom=45
sendmsg=46 recvmsg=47 sendmmsg=307 recvmmsg=299 shutdown=48 setsockopt=54 getsockopt=55
"""
_EPERM = """
ptrace=101 process_vm_readv=310 process_vm_writev=311 kcmp=312 unshare=272 setns=308 mount=165 umount2=166
pivot_root=155 chroot=161 bpf=321 perf_event_open=298 userfaultfd=323 keyctl=250 add_key=248 request_key=249
open_by_handle_at=304 name_to_handle_at=303 fanotify_init=300 init_module=175 finit_module=313
delete_module=176 kexec_load=246 reboot=169 swapon=167 swapoff=168 acct=163 syslog=103 quotactl=179
sethostname=170 setdomainname=171 iopl=172 ioperm=173 modify_ldt=154 personality=135 seccomp=317 setuid=105
setgid=106 setreuid=113 setregid=114 setresuid=117 setresgid=119 setgroups=116 setfsuid=122 setfsgid=123
capset=126 setpriority=141 sched_setaffinity=203 sched_setscheduler=144 sched_setparam=142 sched_setattr=314
ioprio_set=251 migrate_pages=256 move_pages=279 mbind=237 set_mempolicy=238 process_madvise=440
io_uring_setup=425 io_uring_enter=426 io_uring_register=427 pidfd_getfd=438 memfd_secret=447 semget=64
semop=65 semctl=66 semtimedop=220 msgget=68 msgsnd=69 msgrcv=70 msgctl=71 mq_open=240 mq_unlink=241
mq_timedsend=242 mq_timedreceive=243 mq_notify=244 mq_getsetattr=245 vmsplice=278 mknod=133 mknodat=259
settimeofday=164 clock_settime=227 clock_adjtime=305 adjtimex=159 vhangup=153 lookup_dcookie=212
setxattr=188 lsetxattr=189 fsetxattr=190 removexattr=197 lremovexattr=198 fremovexattr=199
"""
# System V shared memory and memory files have no bound but a memory cgroup's.
_SHARED_MEMORY = ("shmget", "shmat", "shmdt", "shmctl", "memfd_create")
_NEW_NAMESPACES = 0x7E020000
_CLONE, _SOCKET, _SOCKETPAIR, _PRLIMIT, _MOUNT, _CAPSET = 56, 41, 53, 302, 165, 126

_EPERM_NUMBER, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_AT_LEAST, _JUMP_SET, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_ARCH_X86_64 = 0xC000003E
_FIRST_ARGUMENT = 16  # offset of its low half in struct seccomp_data


def numbers(text: str) -> dict[str, int]:
    """Names and numbers of a table above."""
    return {name: int(number) for name, _, number in (entry.partition("=") for entry in text.split())}


def allowed(*, shared_memory: bool) -> dict[str, int]:
    """The calls that need no look at their arguments."""
    table = numbers(_FILES + _MEMORY + _PROCESS + _SOCKETS)
    return {name: number for name, number in table.items() if shared_memory or name not in _SHARED_MEMORY}


def _check_machine() -> None:
    if platform.machine() != "x86_64":
        raise SandboxError(f"the sandbox has a system call policy for x86_64 only, not {platform.machine()}")


def kafel(*, shared_memory: bool) -> str:
    """nsjail's policy, as one string for --seccomp_string: the program's, and what the zygote needs besides.

    Raises SandboxError on a machine that is not x86_64: system call numbers differ there, and a policy that
    nobody ran is no protection.
    """
    _check_machine()
    allow = [f"SYSCALL[{number}]" for number in allowed(shared_memory=shared_memory).values()]
    allow += [f"SYSCALL[{number}]" for number in (_CLONE, _MOUNT, _CAPSET, _PRLIMIT)]
    allow += [
        "socket(family) { family == 1 || family == 2 || family == 10 }",
        "socketpair(family) { family == 1 }",
    ]
    taken = (_MOUNT, _CAPSET)
    denied = [f"SYSCALL[{number}]" for number in numbers(_EPERM).values() if number not in taken]
    return (
        "POLICY rlvr { ALLOW { " + ", ".join(allow) + " }, ERRNO(1) { " + ", ".join(denied) + " } } "
        "USE rlvr DEFAULT ERRNO(38)"
    )


def _op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def bpf(*, shared_memory: bool) -> bytes:
    """The program's own filter, as an array of struct sock_filter. Raises SandboxError as `kafel` does.

    No new namespaces: clone3 hides its flags in memory, so it answers ENOSYS and glibc uses clone. Sockets are
    AF_UNIX, AF_INET, AF_INET6 only: AF_VSOCK, AF_NETLINK, AF_ALG and the like are no part of a network namespace,
    or are kernel surface. prlimit64 on oneself only: with another pid a case could set RLIMIT_CPU of the jail's
    init, which has its uid. x32 and i386 calls are no way around.
    """
    _check_machine()
    deny, missing = _op(_RETURN, _ERRNO | _EPERM_NUMBER), _op(_RETURN, _ERRNO | _ENOSYS)
    allow, argument = _op(_RETURN, _ALLOW), _op(_LOAD, _FIRST_ARGUMENT)
    program = [_op(_LOAD, 4), _op(_JUMP_EQUAL, _ARCH_X86_64, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, 0)]
    program += [_op(_JUMP_AT_LEAST, 0x40000000, 0, 1), missing]
    program += [_op(_JUMP_EQUAL, _CLONE, 0, 4), argument, _op(_JUMP_SET, _NEW_NAMESPACES, 0, 1), deny, allow]
    program += [_op(_JUMP_EQUAL, _PRLIMIT, 0, 4), argument, _op(_JUMP_EQUAL, 0, 0, 1), allow, deny]
    program += [_op(_JUMP_EQUAL, _SOCKETPAIR, 0, 4), argument, _op(_JUMP_EQUAL, 1, 0, 1), allow, deny]
    program += [_op(_JUMP_EQUAL, _SOCKET, 0, 6), argument]
    program += [_op(_JUMP_EQUAL, family, 3 - place, 0) for place, family in enumerate((1, 2, 10))]
    program += [deny, allow]
    for last, verdict in _runs(set(allowed(shared_memory=shared_memory).values()), set(numbers(_EPERM).values())):
        program += [_op(_JUMP_ABOVE, last, 1, 0), {"allow": allow, "deny": deny, "missing": missing}[verdict]]
    return b"".join([*program, missing])


def _runs(allow: set[int], deny: set[int]) -> list[tuple[int, str]]:
    """Neighbouring numbers with one verdict, as the last of each run, in ascending order: a third of the
    instructions that one comparison a number takes, and the kernel compiles them for each program."""
    runs: list[tuple[int, str]] = []
    for number in range(max(allow | deny) + 1):
        verdict = "allow" if number in allow else "deny" if number in deny else "missing"
        if runs and runs[-1][1] == verdict:
            runs.pop()
        runs.append((number, verdict))
    return runs
