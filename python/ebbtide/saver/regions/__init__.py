"""Where allocations get their tag: `saver.region`, `saver.disabled`, `saver.cuda_graph`, and the first start of it all.

Imports every room below: `values`, `state`, `tensors`, `check`, `pools` and `reclaim`.
"""
