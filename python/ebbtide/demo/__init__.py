"""The main job: a language model trains while a copy of it generates, two tenants of one device.

`text` and `model` know nothing of ebbtide; `job` is the part that shows it. `ebbtide demo` and
`examples/02_rl_weight_swap.py` both run it.
"""
