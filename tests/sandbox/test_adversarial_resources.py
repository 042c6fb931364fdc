# ruff: noqa: E501  (programs as one-line strings)
"""Programs that want more than they may have, want out, or want to spoil the machine for the next one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from sandbox import CallCase, CallTests, Limits, StdinCase, StdinTests, Verdict
from tests.sandbox.conftest import INC, LIMITS, Bench

Attack = Callable[..., Verdict]
ONE = StdinTests((StdinCase("1\n", "2\n"),))
SYSCALL = "import ctypes\nc=ctypes.CDLL(None,use_errno=True)\n"


def prints(text: str) -> StdinTests:
    return StdinTests((StdinCase("", text + "\n"),))


TIME = [
    ("busy loop", "while 1: pass", ONE, "TLE"),
    ("sleep", "import time; time.sleep(99)", ONE, "TLE"),
    (
        "ignores all signals",
        "import signal\nfor s in range(1,65):\n  try: signal.signal(s,signal.SIG_IGN)\n  except (OSError,ValueError): pass\nwhile 1: pass",
        ONE,
        "TLE",
    ),
    ("stops itself", "import os,signal; os.kill(os.getpid(),signal.SIGSTOP)", ONE, "TLE"),
    (
        "busy in a thread",
        "import threading\ndef g():\n  while 1: pass\nfor _ in range(4): threading.Thread(target=g).start()",
        ONE,
        "TLE",
    ),
    (
        "busy in children, itself asleep",
        "import os\nfor _ in range(3):\n  if os.fork()==0:\n    while 1: pass\nos.wait()",
        ONE,
        "TLE",
    ),
    (
        "short-lived children in turn",
        "import os,time\nwhile 1:\n  if os.fork()==0:\n    t=time.process_time()\n    while time.process_time()-t<.05: pass\n    os._exit(0)\n  os.wait()",
        ONE,
        "TLE",
    ),
    (
        "orphans in turn",
        "import os,time\nwhile 1:\n  if os.fork()==0:\n    if os.fork()==0:\n      t=time.process_time()\n      while time.process_time()-t<.05: pass\n    os._exit(0)\n  os.wait(); time.sleep(.05)",
        ONE,
        "TLE",
    ),
    (
        "raises its own CPU limit",
        "import resource\ntry: resource.setrlimit(resource.RLIMIT_CPU,(99,99))\nexcept (ValueError,OSError): pass\nwhile 1: pass",
        ONE,
        "TLE",
    ),
    (
        "slows itself to be called starved",
        "import os\ntry: os.nice(19)\nexcept OSError: pass\ntry: os.sched_setscheduler(0,os.SCHED_IDLE,os.sched_param(0))\nexcept OSError: pass\n"
        "try: os.sched_setaffinity(0,{0})\nexcept OSError: pass\nwhile 1: pass",
        ONE,
        "TLE",
    ),
    ("fork bomb", "import os\nwhile 1:\n try: os.fork()\n except OSError: pass", ONE, "TLE RE MLE"),
    ("huge int", "print(2**(10**8))", ONE, "TLE"),
    ("exponential regex", "import re; re.match('(a+)+$','a'*40+'b')", ONE, "TLE"),
    (
        "compile bomb",
        "x=" + "(" * 150 + "1" + ")" * 150 + "\n" + "a=[" + "[1]*9," * 20000 + "]\nprint(2)",
        ONE,
        "AC CE",
    ),
    ("deep source", "x=" + "-" * 90000 + "1\nprint(2)", ONE, "CE RE"),
    ("a source of two million bytes", "x=1\n" * 500_000, ONE, "CE"),
    ("waits for input that never comes", "input(); input()", ONE, "RE"),
]

SPACE = [
    ("list", "x=[0]\nwhile 1: x=x+x", ONE, "MLE"),
    ("bytearrays", "x=[]\nwhile 1: x.append(bytearray(1<<20))", ONE, "MLE"),
    ("one huge allocation", "x=bytearray(8<<30)", ONE, "MLE"),
    (
        "catches MemoryError",
        "x=[]\nwhile 1:\n  try: x.append(bytearray(1<<20))\n  except MemoryError: pass",
        ONE,
        "MLE",
    ),
    (
        "eight children",
        "import os,time\nfor _ in range(8):\n  if os.fork()==0:\n    x=bytearray(60<<20)\n    for i in range(0,len(x),4096): x[i]=1\n    time.sleep(9)\nfor _ in range(8): os.wait()\nprint(2)",
        ONE,
        "MLE",
    ),
    (
        "System V segments, detached",
        SYSCALL
        + "c.shmat.restype=ctypes.c_void_p\nwhile 1:\n  i=c.shmget(0,16<<20,0o1666)\n  a=c.shmat(i,None,0)\n  ctypes.memset(a,1,16<<20)\n  c.shmdt(ctypes.c_void_p(a))",
        ONE,
        "MLE",
    ),
    (
        "memory files",
        "import os\nwhile 1:\n  f=os.memfd_create('x')\n  for _ in range(10): os.write(f,b'x'*(1<<20))",
        ONE,
        "MLE",
    ),
    ("shared mapping", "import mmap\nx=mmap.mmap(-1,1<<30)\nfor i in range(0,1<<30,4096): x[i]=1", ONE, "MLE"),
    ("huge file", "f=open('/tmp/x','wb')\nwhile 1: f.write(b'x'*(1<<20))", ONE, "RE"),
    ("many big files", "i=0\nwhile 1:\n  i+=1\n  open(f'/tmp/{i}','wb').write(b'x'*(1<<20))", ONE, "RE"),
    ("many files", "i=0\nwhile 1:\n  i+=1\n  open(f'/tmp/{i}','w')", ONE, "RE"),
    ("sparse file", "f=open('/tmp/x','wb'); f.truncate(1<<40)", ONE, "RE"),
    ("sparse stdout", "import os\ntry: os.ftruncate(1,1<<40)\nexcept OSError: print(2)", ONE, "AC"),
    ("hole in stdout", "import os\nos.lseek(1,10<<20,0)\nos.write(1,b'2')", ONE, "OLE"),
    ("stdout flood", "while 1: print('y'*10000)", ONE, "OLE"),
    ("stdout flood, errors caught", "while 1:\n  try: print('y'*10000)\n  except OSError: pass", ONE, "OLE"),
    ("stderr flood", "import sys\nwhile 1: sys.stderr.write('y'*10000)", ONE, "TLE"),
    (
        "much on stderr",
        "import sys\nfor _ in range(10000): sys.stderr.write('y'*100)\nprint(int(input())+1)",
        INC,
        "AC",
    ),
    (
        "threads",
        "import threading,time\nfor _ in range(5000): threading.Thread(target=time.sleep,args=(9,)).start()",
        ONE,
        "RE TLE",
    ),
    ("descriptors", "import os\nl=[]\nwhile 1: l.append(os.dup(0))", ONE, "RE"),
    (
        "pipes full of data",
        "import os\nl=[]\nwhile 1:\n  r,w=os.pipe(); os.set_blocking(w,False); os.write(w,b'x'*65536); l.append(w)",
        ONE,
        "RE",
    ),
    (
        "daemon that holds stdout",
        "import os,time\nif os.fork()==0:\n  os.setsid()\n  if os.fork()==0: time.sleep(99)\n  os._exit(0)\nos.wait()\nprint(int(input())+1)",
        INC,
        "AC",
    ),
    (
        "stderr left in flight in a socket that holds itself",
        "import socket\na,b=socket.socketpair()\nsocket.send_fds(a,[b'x'],[2,1,b.fileno(),a.fileno()])\nsocket.send_fds(b,[b'x'],[2,a.fileno(),b.fileno()])\nprint(int(input())+1)",
        INC,
        "AC",
    ),
    (
        "daemon that writes later",
        "import os,time\nx=int(input())\nif os.fork()==0:\n  os.setsid()\n  while 1: os.write(1,b'9'); time.sleep(.001)\nos._exit(0)",
        ONE,
        "WA",
    ),
    ("closes 0, 1, 2", "import os;[os.close(i) for i in range(3)]", ONE, "WA"),
    ("segfault", "import ctypes; ctypes.string_at(0)", ONE, "RE"),
    ("abort", "import os; os.abort()", ONE, "RE"),
    (
        "deep recursion",
        "import sys\nsys.setrecursionlimit(1<<25)\ndef f(n): return 0 if n==0 else 1+f(n-1)\nprint(f(200000)-199998)",
        ONE,
        "AC RE MLE",
    ),
    (
        "C recursion",
        "import sys\nsys.setrecursionlimit(1<<30)\nx=[]\nfor _ in range(10**6): x=[x]\nprint(len(repr(x)))",
        ONE,
        "RE MLE TLE",
    ),
    (
        "large stack idiom",
        "import threading,sys\nsys.setrecursionlimit(1<<25)\nthreading.stack_size(1<<29)\ndef main(): print(int(input())+1)\n"
        "t=threading.Thread(target=main); t.start(); t.join()",
        INC,
        "AC",
    ),
    ("long int printed", "print(len(str(10**5000))-4999)", ONE, "AC"),
    (
        "multiprocessing",
        "import multiprocessing as m\ndef g(x): return x+1\nif __name__=='__main__':\n  with m.Pool(2) as p: print(p.map(g,[int(input())])[0])",
        INC,
        "AC",
    ),
    (
        "subprocess of itself",
        "import subprocess,sys\nprint(subprocess.run([sys.executable,'-S','-c','print(2)'],capture_output=True,text=True).stdout)",
        ONE,
        "AC",
    ),
]

ESCAPES = [
    (
        "network",
        "import socket\nbad=[]\nfor a in (('127.0.0.1',80),('8.8.8.8',53),('169.254.169.254',80)):\n  s=socket.socket(); s.settimeout(2)\n"
        "  try: s.connect(a); bad.append(a)\n  except OSError as e: bad += [] if e.errno==101 else [e.errno]\n"
        "try: socket.gethostbyname('example.com'); bad.append('dns')\nexcept OSError: pass\nprint(bad)",
        prints("[]"),
        "AC",
    ),
    (
        "families beside the network namespace",
        "import socket\nbad=[]\nfor f in range(3,50):\n  for k in (1,2,3,5):\n    if f!=10:\n      try: socket.socket(f,k); bad.append((f,k))\n      except OSError: pass\nprint(bad)",
        prints("[]"),
        "AC",
    ),
    (
        "raw sockets",
        "import socket\nfor a in ((2,3,1),(17,3,768),(10,3,58)):\n  try: socket.socket(*a); print('raw')\n  except OSError: pass\nprint('none')",
        prints("none"),
        "AC",
    ),
    (
        "writes outside /tmp",
        "import os,sys\nbad=[]\nfor root in ('/','/usr','/usr/lib','/dev','/opt','/lib64',os.path.dirname(os.__file__)):\n"
        "  try: open(root+'/x','w'); bad.append(root)\n  except OSError: pass\n"
        "for f in (os.__file__, sys.executable):\n  try: open(f,'r+b'); bad.append(f)\n  except OSError: pass\n"
        "  try: os.chmod(f,0o777); bad.append(f)\n  except OSError: pass\n  try: os.unlink(f); bad.append(f)\n  except OSError: pass\nprint(bad)",
        prints("[]"),
        "AC",
    ),
    (
        "raises its limits",
        "import resource as r\nbad=[]\nfor n in (r.RLIMIT_AS,r.RLIMIT_NPROC,r.RLIMIT_NOFILE,r.RLIMIT_FSIZE,r.RLIMIT_CPU,r.RLIMIT_CORE,r.RLIMIT_STACK):\n"
        "  s,h=r.getrlimit(n)\n  try: r.setrlimit(n,(h+1,h+1)); bad.append(n)\n  except (ValueError,OSError): pass\nprint(bad)",
        prints("[]"),
        "AC",
    ),
    (
        "limits of the jail's init",
        "import resource as r\nfor n in (r.RLIMIT_CPU,r.RLIMIT_NOFILE,r.RLIMIT_NPROC,r.RLIMIT_FSIZE):\n"
        "  try: r.prlimit(1,n,(0,0)); print('changed')\n  except OSError: pass\nprint(int(input())+1)",
        INC,
        "AC",
    ),
    (
        "priority and affinity of the jail's init",
        "import os\nfor f in (lambda: os.setpriority(os.PRIO_PROCESS,1,19), lambda: os.sched_setaffinity(1,{0}), lambda: os.sched_setscheduler(1,os.SCHED_IDLE,os.sched_param(0))):\n"
        "  try: f(); print('changed')\n  except OSError: pass\nprint(int(input())+1)",
        INC,
        "AC",
    ),
    (
        "forbidden system calls",
        SYSCALL
        + "calls={'ptrace':(101,16,1),'unshare user':(272,0x10000000),'unshare pid':(272,0x20000000),'mount':(165,0,0,0,0,0),'umount':(166,b'/tmp',0),"
        "'setns':(308,0,0),'pivot_root':(155,b'/',b'/'),'chroot':(161,b'/tmp'),'bpf':(321,0,0,0),'io_uring':(425,8,0),'userfaultfd':(323,0),'perf':(298,0,0,0,0,0),"
        "'keyctl':(250,0,0),'add_key':(248,0,0,0,0,0),'clone3':(435,0,0),'process_vm_readv':(310,1,0,0,0,0,0),'pidfd_getfd':(438,0,0,0),'kcmp':(312,1,1,0,0,0),"
        "'seccomp':(317,1,0,0),'personality':(135,0x0400000),'setuid':(105,0),'capset':(126,0,0),'open_by_handle':(304,0,0,0),'fanotify':(300,0,0),'fsopen':(430,0,0),"
        "'open_tree':(428,0,0,0),'move_mount':(429,0,0,0,0,0),'mount_setattr':(442,0,0,0,0,0),'landlock':(444,0,0,0),'memfd_secret':(447,0),'process_madvise':(440,0,0,0,0,0),"
        "'syslog':(103,3,0,0),'reboot':(169,0,0,0,0),'swapon':(167,0,0),'init_module':(175,0,0,0),'kexec':(246,0,0,0,0),'iopl':(172,3),'modify_ldt':(154,0,0,0),"
        "'mknod':(133,b'/tmp/n',0o60600,0x801),'vmsplice':(278,0,0,0,0),'setxattr':(188,b'/tmp',b'user.a',b'b',1,0)}\n"
        "bad=[]\nfor n,a in calls.items():\n  ctypes.set_errno(0)\n  r=c.syscall(*[x if isinstance(x,bytes) else ctypes.c_long(x) for x in a])\n"
        "  if r>=0 or ctypes.get_errno() not in (1,38): bad.append((n,r,ctypes.get_errno()))\nprint(bad)",
        prints("[]"),
        "AC",
    ),
    (
        "namespaces by clone",
        SYSCALL
        + "bad=[]\nfor f in (0x20000,0x2000000,0x4000000,0x8000000,0x10000000,0x20000000,0x40000000):\n  p=c.syscall(56,ctypes.c_long(f|17),0,0,0,0)\n"
        "  if p==0: c.syscall(231,0)\n  if p>0: bad.append(f)\nprint(bad)",
        prints("[]"),
        "AC",
    ),
    (
        "i386 system calls",
        "import ctypes,mmap\nm=mmap.mmap(-1,4096,prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"
        "f=ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\nprint(f()>0)",
        prints("True"),
        "RE",
    ),
    (
        "x32 system calls",
        SYSCALL + "print(c.syscall(ctypes.c_long(0x40000000|39)))",
        prints("-1"),
        "AC",
    ),
    (
        "capabilities",
        SYSCALL
        + "import struct\nh=ctypes.create_string_buffer(struct.pack('II',0x20080522,0))\nd=ctypes.create_string_buffer(24)\nc.syscall(125,h,d)\n"
        "print(d.raw[:24]==bytes(24), [n for n in range(41) if c.prctl(23,n,0,0,0)==1], c.prctl(39,0,0,0,0))",
        prints("True [] 1"),
        "AC",
    ),
    (
        "other programs",
        "import os\nprint([p for d in ('/usr/bin','/bin','/usr/sbin','/usr/local') if os.path.isdir(d) for p in os.listdir(d) if not p.startswith('python')])",
        prints("[]"),
        "AC",
    ),
    (
        "uid and processes",
        "import os\nassert os.getuid() and os.getgid() and os.getpid()>1\nbad=[]\nfor p in range(3,3000):\n  try:\n    if p!=os.getpid(): os.kill(p,0); bad.append(p)\n  except OSError: pass\nprint(bad)",
        prints("[]"),
        "AC",
    ),
    (
        "signals by group and session",
        "import os,signal\nfor f in (lambda: os.killpg(1,9), lambda: os.kill(-1,0), lambda: os.setpgid(0,1)):\n  try: f()\n  except OSError: pass\n"
        "signal.signal(15,signal.SIG_IGN); os.kill(0,15)\nprint(int(input())+1)",
        INC,
        "AC",
    ),
    (
        "owner signals to init",
        "import fcntl,os\nr,w=os.pipe()\ntry:\n  fcntl.fcntl(r,fcntl.F_SETOWN,1); fcntl.fcntl(r,fcntl.F_SETFL,os.O_ASYNC); os.write(w,b'x')\nexcept OSError: pass\nprint(int(input())+1)",
        INC,
        "AC",
    ),
]

ROWS = [*TIME, *SPACE, *ESCAPES]


@pytest.mark.parametrize(("program", "tests", "verdicts"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_verdict(attack: Attack, program: str, tests: StdinTests, verdicts: str) -> None:
    verdict = attack(program, tests)
    assert verdict.verdict in verdicts.split(), verdict


def test_what_a_program_may_use_is_reported(attack: Attack) -> None:
    program = "x=bytearray(40<<20)\nimport time\nt=time.process_time()\nwhile time.process_time()-t<.1: pass\nprint(int(input())+1)"
    verdict = attack(program, INC)
    assert verdict.verdict == "AC"
    assert all(0.1 <= case.cpu_seconds < 0.4 for case in verdict.cases)
    assert all(case.memory_mb > 40 for case in verdict.cases)


def test_partial_credit_counts_each_case(attack: Attack) -> None:
    verdict = attack("x=int(input())\nif x==2: 1/0\nprint(x+1)", INC, stop_at_first_failure=False)
    assert (verdict.verdict, verdict.passed, verdict.total) == ("RE", 2, 3)
    assert [case.verdict for case in verdict.cases] == ["AC", "RE", "AC"]


def test_a_case_that_dies_of_memory_spares_the_others(attack: Attack) -> None:
    program = "n=int(input())\nx=[0]\nwhile n==2: x=x+x\nprint(n+1)"
    verdict = attack(program, INC, stop_at_first_failure=False)
    assert [case.verdict for case in verdict.cases] == ["AC", "MLE", "AC"]


def test_a_tree_that_lost_a_process_for_want_of_memory_is_ended_at_once(attack: Attack) -> None:
    program = (
        "import os, time\nfor _ in range(8):\n if os.fork()==0:\n  x=bytearray(60<<20)\n"
        "  for i in range(0,len(x),4096): x[i]=1\n  time.sleep(600)\nfor _ in range(8): os.wait()"
    )
    verdict = attack(program, ONE, dataclasses.replace(LIMITS, wall_seconds=300.0))
    assert verdict.verdict == "MLE"
    assert verdict.wall_seconds < 60


def test_early_stop_leaves_the_rest_not_passed(attack: Attack) -> None:
    verdict = attack("x=int(input())\nprint(x+1 if x==1 else 0)", INC)
    assert (verdict.verdict, verdict.passed, verdict.total, len(verdict.cases)) == ("WA", 1, 3, 2)


def test_the_budget_of_a_program_ends_it(attack: Attack) -> None:
    tests = StdinTests(tuple(StdinCase(f"{n}\n", f"{n + 1}\n") for n in range(20)))
    program = "import time\nt=time.process_time()\nwhile time.process_time()-t<.2: pass\nprint(int(input())+1)"
    limits = dataclasses.replace(LIMITS, program_cpu_seconds=0.5)
    verdict = attack(program, tests, limits)
    assert verdict.verdict == "TLE"
    assert len(verdict.cases) == verdict.passed == 3
    assert "all cases together" in verdict.detail


def test_tmp_is_as_large_as_asked(attack: Attack) -> None:
    program = "open('/tmp/x','wb').write(b'x'*(20<<20)); print(int(input())+1)"
    assert attack(program, ONE).verdict == "RE"
    assert attack(program, ONE, dataclasses.replace(LIMITS, tmp_mb=32)).verdict == "AC"


def test_numbers_of_any_length_cross_in_calls(attack: Attack) -> None:
    tests = CallTests("f", (CallCase((10**5000,), 10**5000 + 1),))
    assert attack("def f(x): return x+1", tests).verdict == "AC"


def test_links_and_unreadable_folders_are_wiped(attack: Attack) -> None:
    program = (
        "import os\nprint(len(os.listdir('/tmp')))\nos.makedirs('/tmp/a/b')\nos.symlink('/tmp/a','/tmp/a/b/l')\n"
        "os.link('/tmp/a/b/l','/tmp/h')\nos.chmod('/tmp/a/b',0)\nos.chmod('/tmp/a',0)"
    )
    tests = StdinTests((StdinCase("1", "0\n"), StdinCase("2", "0\n"), StdinCase("3", "0\n")))
    assert attack(program, tests).verdict == "AC"


def test_limits_that_nobody_could_keep_are_infra(bench: Bench) -> None:
    assert bench.grade("print(1)", ONE, Limits(cpu_seconds=0)).verdict == "INFRA"
