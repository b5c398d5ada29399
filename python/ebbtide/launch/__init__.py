"""How a program is started with the preload library: its environment, the options, the file of shared budgets.

For `ebbtide run`, `ebbtide.env` and `ebbtide.preloaded`. Imports the modules at the top of ebbtide, and neither torch
nor the saver.
"""
