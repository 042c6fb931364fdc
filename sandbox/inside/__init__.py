"""What runs inside jails. Each file uses the standard library only; the host compiles several of them as one.

runner + program + zygote are pid 1; plain + names + call, plain + names + wire + solution, and plain + names + wire +
little_pytest + tests are what a case's process executes instead of a bare program.
"""
