"""The main job: a language model trains and a copy of it generates, in turns on one device.

`text` and `model` do not use ebbtide; the examples train them too. `job` is run by `ebbtide demo`.
"""
