"""The main job: a language model trains while a copy of it generates, two tenants of one device.

`text` and `model` do not use ebbtide; the examples train them too. `job` is run by `ebbtide demo`.
"""
