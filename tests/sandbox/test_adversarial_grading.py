# ruff: noqa: E501  (programs as one-line strings)
"""Programs that want to look right: early exits, faked success, attacks on the comparison, stolen answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sandbox import AssertTests, CallCase, CallTests, StdinCase, StdinTests, Tests, Verdict
from tests.sandbox.conftest import INC, F

Attack = Callable[..., Verdict]


def one(given: str, expected: str) -> StdinTests:
    return StdinTests((StdinCase(given, expected),))


def returns(value: object) -> CallTests:
    return CallTests("f", (CallCase((1,), value),))


EXITS = [
    ("os._exit before flush", 'import os; print("2",end=""); os._exit(0)', INC, "WA"),
    ("sys.exit(0) at top", "import sys; sys.exit(0)", INC, "WA"),
    ("exit after the right answer", "print(int(input())+1); raise SystemExit", INC, "AC"),
    ("exit with a message", 'print(int(input())+1); exit("bye")', INC, "RE"),
    ("quit() at the end", "print(int(input())+1)\nquit()", INC, "AC"),
    ("exit(True)", "print(int(input())+1)\nimport sys; sys.exit(True)", INC, "RE"),
    ("exit(256)", "print(int(input())+1)\nimport sys; sys.exit(256)", INC, "AC"),
    ("exit 137", "import sys; sys.exit(137)", INC, "RE"),
    ("exit 255", "import sys; sys.exit(255)", INC, "RE"),
    ("exit 139 after output", "print(int(input())+1, flush=True); import os; os._exit(139)", INC, "RE"),
    ("killed by itself", "import os; os.kill(os.getpid(), 9)", INC, "RE"),
    ("raises after the right answer", "print(int(input())+1, flush=True); 1/0", INC, "RE"),
    ("KeyboardInterrupt", "print(int(input())+1); raise KeyboardInterrupt", INC, "RE"),
    ("call task exits", "import sys\ndef f(x): sys.exit(0)", F, "RE"),
    ("call task _exits", "import os\ndef f(x): os._exit(0)", F, "RE"),
    ("call task exits at import", "import sys\ndef f(x): return x+1\nsys.exit(0)", F, "RE"),
    ("call task without the function", "def g(x): return x+1", F, "RE"),
    ("atexit answer", "import atexit; x=int(input()); atexit.register(lambda: print(x+1))", INC, "AC"),
    (
        "unjoined thread",
        "import threading as t; t.Thread(target=lambda: print(int(input())+1)).start()",
        INC,
        "AC",
    ),
    (
        "daemon thread is not waited for",
        "import threading as t, time\nt.Thread(target=lambda: (time.sleep(.3), print(2)), daemon=True).start()",
        INC,
        "WA",
    ),
    (
        "answer in an unclosed file of fd 1",
        'out = open(1, "w", closefd=False)\nout.write(str(int(input())+1))',
        INC,
        "AC",
    ),
    (
        "own stdout object",
        "import sys, io\nx=int(input())\nsys.stdout=io.TextIOWrapper(io.FileIO(1,'w',closefd=False))\nprint(x+1)",
        INC,
        "AC",
    ),
    ("a deleter prints", "class A:\n def __del__(s): print(int(input())+1)\na=A()", INC, "AC"),
    ("success markers", 'print("ALL TESTS PASSED"); print("OK"); print("1.0")', INC, "WA"),
    ("fake frames on stdout", "import sys; sys.stdout.write('\\x05\\0\\0\\0[[1]]')", INC, "WA"),
    (
        "writes to every descriptor",
        'import os\nfor f in range(3,64):\n  try: os.write(f,b\'[{"st":"OK"}]\')\n  except OSError: pass\n'
        "print(int(input())+1)",
        INC,
        "AC",
    ),
    (
        "forged done frame on every descriptor",
        "import os,struct\nd=struct.pack('<cIiB?dddQ',b'D',1,0,0,False,0.,0.,0.,1)\nfor f in range(0,300):\n"
        "  if f not in (0,1,2):\n    try: os.write(f,d)\n    except OSError: pass\nprint(0)",
        INC,
        "WA",
    ),
    (
        "SIGTERM to its parent",
        "import os,signal\nos.kill(os.getppid(),signal.SIGTERM)\nprint(int(input())+1)",
        INC,
        "AC",
    ),
    ("SIGINT to pid 1", "import os; os.kill(1,2); print(int(input())+1)", INC, "AC"),
    (
        "every signal to pid 1",
        "import os\nfor s in range(1,65):\n  try: os.kill(1,s)\n  except OSError: pass\nprint(int(input())+1)",
        INC,
        "AC",
    ),
    ("kill(-1, 9)", "print(int(input())+1,flush=True); import os; os.kill(-1,9)", INC, "AC RE"),
    ("kill(0, 9)", "print(int(input())+1,flush=True); import os; os.kill(0,9)", INC, "RE AC"),
    ("no code", "   \n", INC, "NO_CODE"),
    ("syntax error", "print((1", INC, "CE"),
    ("tabs and spaces", "if 1:\n\tx=1\n        y=2\n", INC, "CE"),
    ("a NUL in the source", "print(1)\0", INC, "CE"),
    ("a lone surrogate in the source", "print('\ud800')", INC, "CE"),
    ("NBSP in the source", "print(\u00a01)", INC, "CE"),
    ("Python 2", "print 1", INC, "CE"),
]

COMPARISON = [
    (
        "always-equal object",
        "class E:\n def __eq__(s,o): return True\n def __ne__(s,o): return False\ndef f(x): return E()",
        F,
        "RE",
    ),
    (
        "always-equal object in a list",
        "class E:\n def __eq__(s,o): return True\ndef f(x): return [E()]",
        returns([1]),
        "RE",
    ),
    ("int subclass", "class E(int):\n def __eq__(s,o): return True\ndef f(x): return E(7)", F, "RE"),
    (
        "str subclass",
        "class E(str):\n def __eq__(s,o): return True\ndef f(x): return E('a')",
        returns("b"),
        "RE",
    ),
    ("dict subclass", "import collections\ndef f(x): return collections.Counter([1])", returns({1: 1}), "RE"),
    (
        "metaclass lies about type",
        "class M(type):\n def __eq__(s,o): return True\n __hash__=type.__hash__\nclass E(metaclass=M): pass\ndef f(x): return E()",
        F,
        "RE",
    ),
    ("__class__ lies", "class E:\n __class__=int\ndef f(x): return E()", F, "RE"),
    ("json patched", "import json; json.dumps=lambda *a,**k:'42'\ndef f(x): return 0", F, "WA"),
    (
        "forged result on descriptor 3",
        "import os\ndef f(x): os.write(3,b'43'); os._exit(0)",
        F,
        "WA",
    ),
    ("forged malformed result", "import os\ndef f(x): os.write(3,b'{\"zz\":1}'); os._exit(0)", F, "RE"),
    ("forged deep result", "import os\ndef f(x): os.write(3,b'['*100000); os._exit(0)", F, "RE"),
    ("forged huge int", "import os\ndef f(x): os.write(3,b'9'*100000); os._exit(0)", F, "RE"),
    (
        "builtins patched",
        "import builtins,os; x=int(input()); builtins.len=lambda a:0; os.read=None; print(x+1)",
        INC,
        "AC",
    ),
    (
        "everything patched before the end",
        "import os,sys,builtins,gc,atexit,signal,threading\nprint(int(input())+1)\nos._exit=os.write=None\n"
        "sys.stdout.flush()\natexit._run_exitfuncs=None\nfor n in ('getattr','list','BaseException'): setattr(builtins,n,None)",
        INC,
        "AC",
    ),
    (
        "patches every module",
        "import sys; [setattr(m,'compare',lambda *a:True) for m in list(sys.modules.values()) if m]; print(0)",
        INC,
        "WA",
    ),
    ("nan for a number", "print('nan')", one("", "1.5\n"), "WA"),
    ("inf for a number", "print('inf')", one("", "1.5\n"), "WA"),
    ("1e999999999", "print('1e999999999')", one("", "1.0\n"), "WA"),
    ("a million digits", "print('1'*1000000)", one("", "1.0\n"), "WA"),
    ("first token only", "print(5)", one("", "5 1 0\n"), "WA"),
    ("first line only", "print(5)", one("", "5\n1\n"), "WA"),
    ("one token more", "print(5,1,0,0)", one("", "5 1 0\n"), "WA"),
    ("nothing", "", one("", "4\n"), "NO_CODE"),
    ("prints nothing", "pass", one("", "4\n"), "WA"),
    ("every answer", "for i in range(10**5): print(i)", INC, "WA"),
    ("case", "print('yes')", one("", "YES\n"), "WA"),
    ("big ints nearly equal", "print(50000000000000001)", one("", "50000000000000000\n"), "WA"),
    ("CRLF and blanks", "print('2 \\r')", one("", "2\n"), "AC"),
    ("no final newline", "print(2,end='')", one("", "2\n"), "AC"),
    ("six digits", "print('0.333333')", one("", "0.3333333333333\n"), "AC"),
    ("four digits", "print('0.3333')", one("", "0.3333333333333\n"), "WA"),
    ("int for a float", "print('3')", one("", "3.0\n"), "AC"),
    ("float for an int", "print('3.0')", one("", "3\n"), "AC"),
    ("full-width digits", "print('３')", one("", "3\n"), "WA"),
    ("underscore in a number", "print('1_000')", one("", "1000.0\n"), "WA"),
    ("not UTF-8", "import sys; sys.stdout.buffer.write(b'\\xff2')", one("", "2\n"), "WA"),
    ("NUL", "print('2\\0')", one("", "2\n"), "WA"),
    ("tuple for list", "def f(x): return (1,[2])", returns([1, [2]]), "AC"),
    ("bool for int", "def f(x): return True", returns(1), "WA"),
    ("int for bool", "def f(x): return 1", returns(True), "WA"),
    ("int keys for JSON's", "def f(x): return {1:2}", returns({"1": 2}), "AC"),
    ("float in a list", "def f(x): return [0.1+0.2]", returns([0.3]), "AC"),
    ("nan result", "def f(x): return float('nan')", returns(1.5), "WA"),
    ("None for 0", "def f(x): return None", returns(0), "WA"),
    ("None for None", "def f(x): return None", returns(None), "AC"),
    ("set for list", "def f(x): return {1}", returns([1]), "WA"),
    ("generator", "def f(x): yield x+1", F, "RE"),
    ("cyclic list", "def f(x):\n a=[]; a.append(a); return a", F, "RE"),
    ("deep list", "def f(x):\n a=[]\n for _ in range(10**5): a=[a]\n return a", F, "RE"),
    ("huge list", "def f(x): return [0]*(10**6)", F, "OLE"),
    ("prints beside the result", "def f(x):\n print('43'); return x+1", F, "AC"),
    ("Solution method", "class Solution:\n def f(self, x: int) -> int: return x+1", F, "AC"),
    ("prelude names", "class Solution:\n def f(self, x: List[int]) -> Optional[int]: return x+1", F, "AC"),
    (
        "main guard in a call task",
        "def f(x): return x+1\nif __name__=='__main__': print(f(int(input())))",
        F,
        "AC",
    ),
    (
        "mutates its argument",
        "def f(a):\n a.append(1); return a",
        CallTests("f", (CallCase(([],), [1]), CallCase(([],), [1]))),
        "AC",
    ),
]

STOLEN = [
    (
        "gc hunt",
        "import gc; s=[o for o in gc.get_objects() if 'SECRET' in str(o)[:999]]; print(len(s))",
        StdinTests((StdinCase("SECRET-IN-1\n", "SECRET-OUT-1\n"), StdinCase("SECRET-IN-2\n", "SECRET-OUT-2\n"))),
        "WA",
    ),
    (
        "reads files",
        "for p in ('/etc/passwd','/proc/1/environ','correct_output.txt','../tests','/sys/fs/cgroup','/proc/self/maps'):\n"
        "  try: print(open(p).read()); break\n  except OSError: pass\nelse: print('none')",
        one("", "none\n"),
        "AC",
    ),
    (
        "parent's memory",
        "import os\nfor p in ('/proc/1/mem','/proc/1/fd','/proc/1/maps','/proc/self/fd','/dev/fd'):\n"
        "  assert not os.path.lexists(p), p\nprint('none')",
        one("", "none\n"),
        "AC",
    ),
    (
        "descriptors",
        "import os\nopen_=[]\nfor f in range(1024):\n  try: os.fstat(f); open_.append(f)\n  except OSError: pass\nprint(open_)",
        one("", "[0, 1, 2]\n"),
        "AC",
    ),
    (
        "runner's objects",
        "import gc,sys\nf=sys._getframe()\nwhile f.f_back: f=f.f_back\ng=f.f_globals\nfor o in gc.get_objects():\n"
        "  if type(o).__name__=='socket':\n    try: o.send(b'D'+bytes(60))\n    except OSError: pass\n"
        "print(int(input())+1)",
        INC,
        "AC",
    ),
    (
        "environment",
        "import os; print(sorted(k for k in os.environ if k not in ('LC_CTYPE','PYTHONHASHSEED','OMP_NUM_THREADS','OPENBLAS_NUM_THREADS')))",
        one("", "[]\n"),
        "AC",
    ),
    (
        "a file for the next case",
        "import os\nprint(sorted(os.listdir('/tmp')), os.path.exists('/dev/shm/m'))\nos.makedirs('/tmp/d/e/f')\n"
        "open('/tmp/d/e/f/m','w').write('x')\nopen('/dev/shm/m','w').write('x')\nos.chmod('/tmp/d/e',0)\nos.chmod('/tmp',0)",
        StdinTests((StdinCase("1", "[] False\n"), StdinCase("2", "[] False\n"), StdinCase("3", "[] False\n"))),
        "AC",
    ),
    (
        "a deep tree for the next case",
        "import os\nprint(len(os.listdir('/tmp')))\nfor i in range(900):\n  os.mkdir('d'); os.chdir('d')",
        StdinTests((StdinCase("1", "0\n"), StdinCase("2", "0\n"))),
        "AC",
    ),
    (
        "a path too long for the wipe",
        "import os\nprint(len(os.listdir('/tmp')))\nfor i in range(60):\n  os.mkdir('d'*200); os.chdir('d'*200)",
        StdinTests((StdinCase("1", "0\n"), StdinCase("2", "0\n"))),
        "AC",
    ),
    (
        "the folder's times and mode for the next case",
        "import os\ns=os.stat('/tmp')\nprint(oct(s.st_mode), s.st_mtime if s.st_mtime==0 else 'first')\nos.utime('/tmp',(5,5)); os.chmod('/tmp',0o700)",
        StdinTests((StdinCase("1", "0o41777 first\n", ("0o41777 0.0\n",)), StdinCase("2", "0o41777 0.0\n"))),
        "AC",
    ),
    (
        "shared memory for the next case",
        "import ctypes\nc=ctypes.CDLL(None)\ni=c.shmget(77,4096,0o1666)\nc.shmat.restype=ctypes.c_void_p\na=c.shmat(i,None,0)\n"
        "print(ctypes.string_at(a,4)==b'mark')\nctypes.memmove(a,b'mark',4)",
        StdinTests((StdinCase("1", "False\n"), StdinCase("2", "False\n"))),
        "AC",
    ),
    (
        "an abstract socket for the next case",
        "import socket,os\ns=socket.socket(socket.AF_UNIX)\ntry:\n  s.connect('\\0mark'); print('there')\nexcept OSError: print('none')\n"
        "if os.fork()==0:\n  os.setsid()\n  t=socket.socket(socket.AF_UNIX); t.bind('\\0mark'); t.listen(); t.accept()",
        StdinTests((StdinCase("1", "none\n"), StdinCase("2", "none\n"))),
        "AC",
    ),
    (
        "keyrings, message queues, semaphores",
        "import ctypes\nc=ctypes.CDLL(None,use_errno=True)\nbad=[]\nfor n,a in ((250,(0,0)),(248,(0,0,0,0,0)),(68,(7,0o1666)),(64,(7,1,0o1666)),(240,(0,0o102,0o666,0))):\n"
        "  if c.syscall(n,*a)>=0: bad.append(n)\nprint(bad)",
        one("", "[]\n"),
        "AC",
    ),
    ("hard-coded public examples", 'print({"1":"2","2":"3"}.get(input(),"0"))', INC, "WA"),
    ("sniffs stdin", "import sys; d=sys.stdin.read(); print(d.split()[-1])", INC, "WA"),
    (
        "reads stdin twice",
        "import sys; x=int(sys.stdin.read()); assert sys.stdin.read()==''; print(x+1)",
        INC,
        "AC",
    ),
    ("reads by descriptor", "import os; print(int(os.read(0,100))+1)", INC, "AC"),
    ("reads through open(0)", "print(int(open(0).read())+1)", INC, "AC"),
    (
        "reads bytes line by line",
        "import sys; r=sys.stdin.buffer.readline; x=int(r()); assert r()==b''; print(x+1)",
        INC,
        "AC",
    ),
    ("writes bytes", "import sys; sys.stdout.buffer.write(b'%d\\n' % (int(input())+1))", INC, "AC"),
    ("seeks its input", "import sys; sys.stdin.read(); sys.stdin.seek(0); print(int(input())+1)", INC, "AC"),
]

ASSERTS = [
    (
        "pytest word and own tests",
        "# pytest\ndef test_ok(): pass\ndef f(x): return 0",
        AssertTests("f", "import pytest\nfrom solution import f\ndef test_one():\n    assert f(1) == 2\n"),
        "WA",
    ),
    (
        "conftest written",
        "open('/tmp/conftest.py','w').write('def pytest_runtest_makereport(*a): pass')\ndef f(x): return 0",
        AssertTests("f", "import random\ndef test_one():\n    assert f(random.randint(1, 1)) == 2\n"),
        "WA",
    ),
    (
        "unittest patched",
        "import unittest; unittest.TestCase.assertEqual=lambda *a,**k:None\ndef f(x): return 0",
        AssertTests(
            "f",
            "import unittest\nclass TestF(unittest.TestCase):\n    def test_one(self):\n        self.assertEqual(f(1), 2)\n",
        ),
        "WA",
    ),
    (
        "always equal, converted",
        "class E:\n def __eq__(s,o): return True\n def __lt__(s,o): return True\ndef f(x): return E()",
        AssertTests("f", "assert f(1) == 2"),
        "RE",
    ),
    (
        "always equal, in the other jail",
        "class E:\n def __eq__(s,o): return True\n def __bool__(s): return True\n def __abs__(s): return 0\n def __sub__(s,o): return 0\ndef f(x): return E()",
        AssertTests("f", "import random\nassert f(random.randint(1, 1)) == 2"),
        "WA",
    ),
    (
        "truthy object, in the other jail",
        "class E: pass\ndef f(x): return E()",
        AssertTests("f", "import random\nassert f(random.randint(1, 1))"),
        "WA",
    ),
    (
        "exits in the other jail",
        "import os\ndef f(x): os._exit(0)",
        AssertTests("f", "import random\nassert f(random.randint(1, 1)) == 2"),
        "RE",
    ),
    (
        "forged reply on the wire",
        "import os,json\nd=json.dumps(['value',2,[None]]).encode()\ndef f(x):\n os.write(4,len(d).to_bytes(4,'big')+d); return 3",
        AssertTests(
            "f",
            "import random\ndef test_a():\n    assert f(random.randint(1, 1)) == 2\ndef test_b():\n    assert f(random.randint(2, 2)) == 7\n",
        ),
        "WA RE",
    ),
    (
        "floods the wire",
        "import os\ndef f(x):\n while True: os.write(4,b'\\xff'*65536)",
        AssertTests("f", "import random\nassert f(random.randint(1, 1)) == 2"),
        "RE TLE",
    ),
    (
        "a bomb on the wire",
        "import os\nd=b'['*3000000\ndef f(x):\n os.write(4,len(d).to_bytes(4,'big')+d)",
        AssertTests("f", "import random\nassert f(random.randint(1, 1)) == 2"),
        "RE",
    ),
    (
        "patches the tests' modules, which are elsewhere",
        "import sys,random\nrandom.randint=lambda a,b: 5\nsys.exit=None\ndef f(x): return 7",
        AssertTests("f", "import random\nassert f(random.randint(1, 1)) == 2"),
        "WA",
    ),
    (
        "a missing name is the program's fault",
        "def f(x): return 2",
        AssertTests("f", "from solution import f, helper\ndef test_one():\n    assert helper(f(1)) == 2\n"),
        "WA",
    ),
]


ROWS = [*EXITS, *COMPARISON, *STOLEN, *ASSERTS]


@pytest.mark.parametrize(("program", "tests", "verdicts"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_verdict(attack: Attack, program: str, tests: Tests, verdicts: str) -> None:
    verdict = attack(program, tests)
    assert verdict.verdict in verdicts.split(), verdict
    assert not verdict.soft
