"""Tensors that several processes use (`saver.share`, `saver.attach`, torch's queues), and tensors that stay."""
