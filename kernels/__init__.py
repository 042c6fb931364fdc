"""The maths that has to be fast: every operation as `reference`, `cpu` and `triton`, behind one dispatch
rule.

`layout` says how segments share their prefixes, `attention`, `lm_head` and `lora` are the operations and
`dispatch` chooses the implementation. Nothing here knows about reinforcement learning, models or the engine.
"""
